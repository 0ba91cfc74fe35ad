//! A server of the pseudo-model on a loopback socket.

use super::model::{EOS, PseudoModel, VOCAB_SIZE};
use marlin_http::{ApiOptions, ApiState, Model, ServeOptions, serve, shown_tokens};
use marlin_serve::SchedulerConfig;
use marlin_serve::server::{Server, ServerHandle, ServerOptions};
use marlin_testing::byte_level_tokenizer;
use marlin_text::{ChatTemplate, Tokenizer};
use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::thread::JoinHandle;
use tokio::net::TcpListener;
use tokio::sync::oneshot;

/// A template like those of Qwen 3: roles in lines, tools, reasoning.
pub const TEMPLATE: &str = "\
{%- if tools %}<tools>{{ tools | tojson }}</tools> Answer with <tool_call>.\n{% endif %}
{%- for message in messages %}[{{ message.role }}]{{ message.content }}
{%- for call in message.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>{% endfor -%}
</s>{% endfor %}
{%- if add_generation_prompt %}[assistant]{% if enable_thinking is defined and not enable_thinking %}<think></think>{% elif opens_reasoning %}<think>
{% endif %}{% endif %}";

/// A template like that of gpt-oss: messages on channels.
pub const HARMONY: &str = "\
<|start|>system<|message|>Reasoning: {{ reasoning_effort | default('medium') }}<|end|>
{%- if tools %}<|start|>developer<|message|>{% for tool in tools %}// {{ tool.function.description + '\n' }}type {{ tool.function.name }}{% endfor %}<|end|>{% endif %}
{%- for message in messages %}
{%- if message.role == 'assistant' %}
{%- if message.thinking and message.tool_calls %}<|start|>assistant<|channel|>analysis<|message|>{{ message.thinking }}<|end|>{% endif %}
{%- if message.tool_calls %}<|start|>assistant to=functions.{{ message.tool_calls[0].function.name }}<|channel|>commentary json<|message|>{{ message.tool_calls[0].function.arguments | tojson }}<|call|>
{%- else %}<|start|>assistant<|channel|>final<|message|>{{ message.content }}<|end|>{% endif %}
{%- elif message.role == 'tool' %}<|start|>functions to=assistant<|channel|>commentary<|message|>{{ message.content | tojson }}<|end|>
{%- else %}<|start|>{{ message.role }}<|message|>{{ message.content }}<|end|>{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|start|>assistant{% endif %}";

/// The options of a [`TestServer`].
pub struct TestOptions {
    pub api: ApiOptions,
    pub serve: ServeOptions,
    pub scheduler: SchedulerConfig,
    /// The most events that wait for a reader.
    pub event_buffer: usize,
    /// The chat template, if there is one.
    pub template: Option<&'static str>,
    /// The special tokens of the model after `</s>`.
    pub special: &'static [&'static str],
    /// True if prompts can ask the model for faults.
    pub faults: bool,
}

impl Default for TestOptions {
    fn default() -> Self {
        Self {
            api: ApiOptions::default(),
            serve: ServeOptions::default(),
            scheduler: SchedulerConfig::new(2048),
            event_buffer: 1024,
            template: Some(TEMPLATE),
            special: &[],
            faults: true,
        }
    }
}

/// Returns the tokenizer with further special tokens.
fn tokenizer(special: &[&str]) -> String {
    let mut json = byte_level_tokenizer();
    let added = json["added_tokens"].as_array_mut().unwrap();
    for (text, id) in special.iter().zip(VOCAB_SIZE..) {
        let mut token = added[0].clone();
        token["content"] = (*text).into();
        token["id"] = id.into();
        added.push(token);
    }
    json.to_string()
}

/// A server that ends when it is dropped.
pub struct TestServer {
    pub address: SocketAddr,
    pub engine: ServerHandle,
    stop: Option<oneshot::Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

impl TestServer {
    /// Starts a server with the default options.
    pub fn start() -> Self {
        Self::with(TestOptions::default())
    }

    pub fn with(options: TestOptions) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("tokenizer.json");
        std::fs::write(&path, tokenizer(options.special)).unwrap();
        let vocab_size = VOCAB_SIZE + options.special.len();
        let open = || Tokenizer::open(&path).unwrap().for_model(vocab_size);
        let tokens = BTreeMap::from([("eos_token".to_string(), "</s>".to_string())]);
        let template = options
            .template
            .map(|text| ChatTemplate::compile(text, "test".into(), tokens).unwrap());
        let mut server_options = ServerOptions::new(options.scheduler);
        server_options.eos_tokens = vec![EOS];
        server_options.event_buffer = options.event_buffer;
        let mut engine_tokenizer = open();
        if let Some(template) = &template {
            let stop_tokens = template.stop_tokens(&engine_tokenizer);
            server_options.eos_tokens.extend(stop_tokens);
            engine_tokenizer = engine_tokenizer.showing(&shown_tokens(template)).unwrap();
        }
        let model = PseudoModel::new(vocab_size, options.faults);
        let engine = Server::start(model, engine_tokenizer, server_options).unwrap();
        let mut model = Model::new("test/model");
        model.aliases.push("alias".into());
        let state = ApiState::new(engine.clone(), open(), template, model, options.api).unwrap();
        let (stop, stopped) = oneshot::channel();
        let (ready, address) = std::sync::mpsc::channel();
        let serve_options = options.serve;
        let thread = std::thread::spawn(move || {
            let runtime = tokio::runtime::Builder::new_multi_thread()
                .worker_threads(2)
                .enable_all()
                .build()
                .unwrap();
            runtime.block_on(async {
                let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
                ready.send(listener.local_addr().unwrap()).unwrap();
                let stopped = async { _ = stopped.await };
                serve(listener, state, serve_options, stopped)
                    .await
                    .unwrap();
            });
        });
        Self {
            address: address.recv().unwrap(),
            engine,
            stop: Some(stop),
            thread: Some(thread),
        }
    }

    /// Begins the shutdown.
    pub fn stop(&mut self) {
        drop(self.stop.take());
    }

    /// Waits until the server has ended.
    pub fn join(&mut self) {
        if let Some(thread) = self.thread.take() {
            thread.join().unwrap();
        }
    }
}

impl Drop for TestServer {
    fn drop(&mut self) {
        self.stop();
        if let Some(thread) = self.thread.take() {
            let joined = thread.join();
            if !std::thread::panicking() {
                joined.unwrap();
            }
        }
    }
}
