// The page: a chat with the served model, and a live view of the server.

import { fillAnswer } from "./answer.js";
import { fetchModels } from "./client.js";
import { button, byId, element } from "./dom.js";
import { startLive } from "./live.js";
import { MessageLog } from "./log.js";
import { SettingsDialog } from "./settings.js";
import * as store from "./store.js";

/** The time between two writes of a growing answer to the storage, in milliseconds. */
const SAVE_INTERVAL = 1000;
const UNAUTHORIZED = 401;

const log = new MessageLog();
const settings = new SettingsDialog(() => saveSettings());
/** What stops the answers in progress, by the conversation's id. */
const running = new Map();
let conversations = store.loadConversations();
let current = conversations.find(({ id }) => id === store.loadCurrent()) ?? conversations[0];
let models = [];
let model = "";
/** True while the page is left: its requests break then, which is no failure of an answer. */
let isLeft = false;

/** Shows a conversation. */
function open(conversation) {
  current = conversation;
  store.saveCurrent(conversation.id);
  for (const message of conversation.messages) {
    if (message.running && !running.has(conversation.id)) {
      message.running = false;
      message.note = "Interrupted";
    }
  }
  log.show(conversation.messages);
  showConversations();
  showRunning();
}

function showConversations() {
  byId("chat-title").textContent = current.title;
  document.title = `${current.title} – burn-marlin`;
  byId("conversation-list").replaceChildren(
    ...conversations.map((conversation) => {
      const mark = conversation === current ? { "aria-current": "true" } : {};
      const choose = button(conversation.title, { class: "choose", ...mark }, () => {
        open(conversation);
        showView("chat");
        byId("prompt").focus();
      });
      const label = { class: "delete", "aria-label": `Delete ${conversation.title}` };
      const remove = button("×", label, () => removeConversation(conversation));
      return element("li", {}, choose, remove);
    }),
  );
}

function showRunning() {
  const isRunning = running.has(current.id);
  const hadFocus = document.activeElement === byId("stop");
  byId("stop").hidden = !isRunning;
  byId("send").hidden = isRunning;
  if (hadFocus && !isRunning) {
    byId("prompt").focus();
  }
}

function startConversation() {
  // One empty conversation is enough.
  let conversation = conversations.find(({ messages }) => messages.length === 0);
  if (!conversation) {
    conversation = store.newConversation(current);
    conversations.unshift(conversation);
  }
  open(conversation);
  showView("chat");
  byId("prompt").focus();
}

function removeConversation(conversation) {
  if (conversation.messages.length > 0 && !confirm(`Delete “${conversation.title}”?`)) {
    return;
  }
  running.get(conversation.id)?.abort();
  store.removeConversation(conversation.id);
  conversations = conversations.filter((other) => other !== conversation);
  if (conversations.length === 0) {
    conversations.push(store.newConversation());
  }
  if (conversation === current) {
    open(conversations[0]);
  } else {
    showConversations();
  }
  byId("new-conversation").focus();
}

/** Keeps a conversation, unless it was deleted meanwhile. */
function save(conversation) {
  if (!isLeft && conversations.includes(conversation) && !store.saveConversation(conversation)) {
    notify("The browser does not keep this conversation: its storage is full or closed.");
  }
}

async function send() {
  const prompt = byId("prompt");
  const text = prompt.value.trim();
  if (text === "" || running.has(current.id)) {
    return;
  }
  const conversation = current;
  prompt.value = "";
  resizePrompt();
  notify("");
  const question = { role: "user", content: text };
  const answer = store.newAnswer();
  if (conversation.messages.length === 0) {
    conversation.title = store.titleOf(text);
  }
  conversation.messages.push(question, answer);
  conversation.updated = Date.now();
  conversations = [conversation, ...conversations.filter((other) => other !== conversation)];
  log.add(question);
  log.add(answer);
  const controller = new AbortController();
  running.set(conversation.id, controller);
  save(conversation);
  showConversations();
  showRunning();
  await complete(conversation, answer, controller.signal);
  running.delete(conversation.id);
  save(conversation);
  showRunning();
  if (answer.error !== "" && conversation === current && prompt.value === "") {
    // To be sent again.
    prompt.value = text;
    resizePrompt();
  }
}

async function complete(conversation, answer, signal) {
  if (model === "") {
    await loadModels();
  }
  let saved = Date.now();
  const changed = () => {
    log.update(answer);
    if (Date.now() - saved > SAVE_INTERVAL) {
      saved = Date.now();
      save(conversation);
    }
  };
  const apiKey = store.loadApiKey();
  const status = await fillAnswer(conversation, answer, { model, apiKey, signal, changed });
  if (status === UNAUTHORIZED) {
    settings.open(current, { models, model, apiKey }, "api-key");
  }
}

function stop() {
  running.get(current.id)?.abort();
}

function saveSettings() {
  const values = settings.values();
  current.system = values.system;
  current.temperature = values.temperature;
  current.maxTokens = values.maxTokens;
  store.saveApiKey(values.apiKey);
  if (current.messages.length > 0) {
    save(current);
  }
  model = values.model;
  loadModels();
}

/** Reads the names of the model, and shows one. */
async function loadModels() {
  try {
    models = await fetchModels(store.loadApiKey());
    model = models.includes(model) ? model : models[0];
    byId("model-name").textContent = model;
    notify("");
  } catch (error) {
    const isRefused = error.status === UNAUTHORIZED;
    notify(isRefused ? "The server asks for an API key: see Settings." : error.message);
  }
}

function notify(text) {
  byId("notice").textContent = text;
  byId("notice").hidden = text === "";
}

/** Shows one of the three views on narrow screens; on wide ones, all are seen. */
function showView(view) {
  document.body.dataset.view = view;
  for (const other of byId("views").children) {
    if (other.dataset.view === view) {
      other.setAttribute("aria-current", "page");
    } else {
      other.removeAttribute("aria-current");
    }
  }
}

/** Takes over what another tab stored: a conversation's change, or any if `changed` is null. */
function followOtherTab(changed) {
  const isKept = ({ id }) =>
    running.has(id) || (id === current.id && changed !== null && id !== changed);
  const kept = conversations.filter(isKept);
  const stored = store.loadConversations().map(
    (conversation) => kept.find(({ id }) => id === conversation.id) ?? conversation,
  );
  conversations = [...kept.filter((conversation) => !stored.includes(conversation)), ...stored];
  if (conversations.length === 0) {
    conversations.push(store.newConversation());
  }
  const shown = conversations.find(({ id }) => id === current.id) ?? conversations[0];
  if (shown === current) {
    showConversations();
  } else {
    open(shown);
  }
}

function resizePrompt() {
  const prompt = byId("prompt");
  prompt.style.height = "auto";
  prompt.style.height = `${prompt.scrollHeight + 2}px`;
}

function listen() {
  byId("composer").addEventListener("submit", (event) => {
    event.preventDefault();
    send();
  });
  byId("prompt").addEventListener("input", resizePrompt);
  byId("prompt").addEventListener("keydown", (event) => {
    // Enter also ends the input of a character by an input method.
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
      event.preventDefault();
      send();
    }
  });
  byId("chat").addEventListener("keydown", (event) => {
    if (event.key === "Escape" && !event.isComposing) {
      stop();
    }
  });
  byId("stop").addEventListener("click", stop);
  byId("new-conversation").addEventListener("click", startConversation);
  byId("open-settings").addEventListener("click", () => {
    settings.open(current, { models, model, apiKey: store.loadApiKey() }, "system");
  });
  for (const choice of byId("views").children) {
    choice.addEventListener("click", () => showView(choice.dataset.view));
  }
  addEventListener("pagehide", () => {
    for (const conversation of conversations) {
      if (running.has(conversation.id)) {
        save(conversation);
      }
    }
    isLeft = true;
  });
  addEventListener("pageshow", () => {
    isLeft = false;
  });
  addEventListener("storage", ({ key }) => {
    // Without a key, another tab has cleared the storage.
    const id = key === null ? null : store.idOfKey(key);
    if (key === null || id !== null) {
      followOtherTab(id);
    }
  });
}

if (!current) {
  current = store.newConversation();
  conversations.push(current);
}
listen();
open(current);
loadModels();
startLive();
