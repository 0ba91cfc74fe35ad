//! The bodies of requests, with random prompts.

use crate::error::LoadError;
use crate::generate::Prepared;
use crate::options::{Endpoint, LoadOptions};
use hyper::body::Bytes;
use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};
use serde::Serialize;
use serde_json::{Map, Value, json};

/// Words that are one token in most vocabularies.
const WORDS: &str = "\
    a about after all also an and any are as at back be because been before but by can come \
    could day do down even first for from get give go good had has have he her here him his \
    how i if in into is it its just know last life like long look made make man many may me \
    more most much must my new no not now of off old on one only or other our out over own \
    part people place right same say see she should small so some state still such take than \
    that the their them then there these they thing think this those time to too two under \
    up us use very want was water way we well were what when where which while who will with \
    word work world would year you your";
/// The number of letter strings in the sample that is tokenized.
const SAMPLE: usize = 1000;

/// What random tokens are drawn from.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Vocabulary {
    /// The IDs below a number.
    Below(u32),
    /// IDs that `/tokenize` has returned.
    Listed(Vec<u32>),
    /// Words, as a text.
    Words,
}

/// Makes requests from their number: the same whenever and in whatever order they are made.
pub(crate) struct RequestMaker {
    options: LoadOptions,
    model: String,
    vocabulary: Vocabulary,
    prefix: Vec<u32>,
}

#[derive(Serialize)]
struct Body<'a> {
    model: &'a str,
    #[serde(flatten)]
    prompt: Prompt,
    #[serde(flatten)]
    limit: Limit,
    stream: bool,
    stream_options: StreamOptions,
    #[serde(skip_serializing_if = "is_false")]
    ignore_eos: bool,
    #[serde(flatten)]
    extra: &'a Map<String, Value>,
}

#[derive(Serialize)]
struct StreamOptions {
    include_usage: bool,
}

#[derive(Serialize)]
#[serde(rename_all = "snake_case")]
enum Prompt {
    #[serde(rename = "prompt")]
    Tokens(Vec<u32>),
    #[serde(rename = "prompt")]
    Text(String),
    Messages(Value),
}

#[derive(Serialize)]
#[serde(rename_all = "snake_case")]
enum Limit {
    MaxTokens(usize),
    MaxCompletionTokens(usize),
}

fn is_false(value: &bool) -> bool {
    !value
}

impl RequestMaker {
    pub fn new(options: &LoadOptions, model: String, vocabulary: Vocabulary) -> Self {
        let mut maker = Self {
            options: options.clone(),
            model,
            vocabulary,
            prefix: Vec::new(),
        };
        // No request has this number.
        let mut rng = maker.rng(u64::MAX);
        maker.prefix = maker.draw(options.prefix_len, &mut rng);
        maker
    }

    /// Returns whether prompts are token IDs.
    pub fn has_token_ids(&self) -> bool {
        self.vocabulary != Vocabulary::Words
    }

    fn rng(&self, number: u64) -> StdRng {
        let mut seed = [0; 32];
        seed[..8].copy_from_slice(&self.options.seed.to_le_bytes());
        seed[8..16].copy_from_slice(&number.to_le_bytes());
        StdRng::from_seed(seed)
    }

    /// Draws tokens, or the numbers of words.
    fn draw(&self, len: usize, rng: &mut StdRng) -> Vec<u32> {
        let words = WORDS.split_whitespace().count() as u32;
        let draw = |_| match &self.vocabulary {
            Vocabulary::Below(size) => rng.random_range(0..*size),
            Vocabulary::Listed(tokens) => tokens[rng.random_range(0..tokens.len())],
            Vocabulary::Words => rng.random_range(0..words),
        };
        (0..len).map(draw).collect()
    }

    /// Returns request `index` of the measurement.
    pub fn request(&self, index: usize) -> Result<Prepared, LoadError> {
        self.make(
            index,
            format!("load-{}-{index}", self.options.seed),
            index as u64,
        )
    }

    /// Returns a request before the measurement. Its prompt is that of no other.
    pub fn warmup(&self, index: usize) -> Result<Prepared, LoadError> {
        let id = format!("warmup-{}-{index}", self.options.seed);
        let mut request = self.make(index, id, u64::MAX - 1 - index as u64)?;
        request.cancel_after = None;
        Ok(request)
    }

    fn make(&self, index: usize, id: String, number: u64) -> Result<Prepared, LoadError> {
        let options = &self.options;
        let mut rng = self.rng(number);
        let input_len = options.input_len.draw(&mut rng);
        let output_len = options.output_len.draw(&mut rng);
        let cancelled = rng.random_bool(options.cancel_fraction);
        let cancel_after = rng.random_range(1..=output_len);
        let mut tokens = self.prefix.clone();
        tokens.extend(self.draw(input_len, &mut rng));
        let input_tokens = tokens.len();
        let (prompt, limit) = match options.endpoint {
            Endpoint::Completions if self.vocabulary == Vocabulary::Words => {
                (Prompt::Text(text(&tokens)), Limit::MaxTokens(output_len))
            }
            Endpoint::Completions => (Prompt::Tokens(tokens), Limit::MaxTokens(output_len)),
            Endpoint::Chat => (
                Prompt::Messages(json!([{"role": "user", "content": text(&tokens)}])),
                Limit::MaxCompletionTokens(output_len),
            ),
        };
        let body = serde_json::to_vec(&Body {
            model: &self.model,
            prompt,
            limit,
            stream: true,
            stream_options: StreamOptions {
                include_usage: true,
            },
            ignore_eos: options.ignore_eos,
            extra: &options.extra_body,
        });
        Ok(Prepared {
            index,
            path: options.endpoint.path(),
            id,
            body: Bytes::from(body.map_err(|error| LoadError::Option {
                option: "extra_body",
                reason: error.to_string(),
            })?),
            input_tokens,
            cancel_after: cancelled.then_some(cancel_after),
        })
    }
}

/// Returns words as a text.
fn text(numbers: &[u32]) -> String {
    let words: Vec<&str> = WORDS.split_whitespace().collect();
    let words: Vec<&str> = numbers
        .iter()
        .map(|&number| words[number as usize])
        .collect();
    words.join(" ")
}

/// Returns a text with many different tokens.
pub(crate) fn sample_text(seed: u64) -> String {
    let mut rng = StdRng::seed_from_u64(seed);
    let mut text = WORDS.to_string();
    for _ in 0..SAMPLE {
        text.push(' ');
        let len = rng.random_range(1..=6);
        text.extend((0..len).map(|_| char::from(rng.random_range(b'a'..=b'z'))));
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::options::Length;

    fn options() -> LoadOptions {
        let mut options = LoadOptions::new("http://127.0.0.1:1");
        options.seed = marlin_testing::seed();
        options.input_len = Length { min: 3, max: 9 };
        options.output_len = Length { min: 2, max: 5 };
        options.prefix_len = 4;
        options.ignore_eos = true;
        options.extra_body.insert("temperature".into(), json!(0.5));
        options
    }

    fn body(request: &Prepared) -> Value {
        serde_json::from_slice(&request.body).unwrap()
    }

    #[test]
    fn requests_follow_from_the_seed_and_share_their_prefix() {
        let options = options();
        let make = || {
            let tokens = (100..200).collect();
            RequestMaker::new(&options, "m".into(), Vocabulary::Listed(tokens))
        };
        let (maker, again) = (make(), make());
        let prompts: Vec<Vec<u64>> = (0..200)
            .map(|index| {
                let request = maker.request(index).unwrap();
                let body = body(&request);
                assert_eq!(body, self::body(&again.request(index).unwrap()));
                let prompt = body["prompt"].as_array().unwrap();
                let prompt: Vec<u64> = prompt.iter().map(|id| id.as_u64().unwrap()).collect();
                assert_eq!(request.input_tokens, prompt.len());
                assert!((7..=13).contains(&prompt.len()), "{}", prompt.len());
                assert!(prompt.iter().all(|id| (100..200).contains(id)));
                assert!((2..=5).contains(&body["max_tokens"].as_u64().unwrap()));
                assert_eq!(body["ignore_eos"], true);
                assert_eq!(body["stream"], true);
                assert_eq!(body["stream_options"]["include_usage"], true);
                assert_eq!(body["temperature"], 0.5);
                prompt
            })
            .collect();
        assert!(prompts.iter().all(|prompt| prompt[..4] == prompts[0][..4]));
        assert!(
            prompts[1..]
                .iter()
                .all(|prompt| prompt[4..] != prompts[0][4..])
        );
        let lens: std::collections::HashSet<usize> = prompts.iter().map(Vec::len).collect();
        assert_eq!(lens.len(), 7, "all lengths of the range occur: {lens:?}");
    }

    #[test]
    fn words_are_a_text_and_a_message() {
        let mut options = options();
        let maker = RequestMaker::new(&options, "m".into(), Vocabulary::Words);
        let text = body(&maker.request(0).unwrap());
        let words = text["prompt"].as_str().unwrap().split(' ').count();
        assert!((7..=13).contains(&words));
        options.endpoint = Endpoint::Chat;
        let maker = RequestMaker::new(&options, "m".into(), Vocabulary::Words);
        let chat = body(&maker.request(0).unwrap());
        assert_eq!(chat["messages"][0]["content"], text["prompt"]);
        assert_eq!(chat["max_completion_tokens"], text["max_tokens"]);
        assert_eq!(chat["max_tokens"], Value::Null);
    }

    #[test]
    fn the_fraction_of_cancelled_requests_is_kept() {
        let mut options = options();
        options.cancel_fraction = 0.3;
        let maker = RequestMaker::new(&options, "m".into(), Vocabulary::Below(9));
        let cancels: Vec<usize> = (0..10_000)
            .filter_map(|index| maker.request(index).unwrap().cancel_after)
            .collect();
        // Five standard errors.
        let expected = 3000.0;
        assert!((cancels.len() as f64 - expected).abs() < 5.0 * (expected * 0.7_f64).sqrt());
        assert!(cancels.iter().all(|&after| (1..=5).contains(&after)));
        assert!(maker.warmup(0).unwrap().cancel_after.is_none());
    }
}
