// Conversations in the browser's storage, one entry for each, and the API key of the tab.

const PREFIX = "burn-marlin/conversation/";
const CURRENT = "burn-marlin/current";
const API_KEY = "burn-marlin/api-key";
const TITLE_LENGTH = 60;
const EMPTY = { content: "", reasoning: "", note: "", error: "", running: false };

/** Makes an answer without text. */
export function newAnswer() {
  return { role: "assistant", ...EMPTY, running: true };
}

/**
 * Makes a conversation. `temperature` and `maxTokens` are null where the server decides.
 *
 * A message has a `role` and `content`; an answer also `reasoning`, a `note` for the reader,
 * `error` with the reason if it failed, and `running` until it has ended.
 */
export function newConversation(settings = {}) {
  return {
    id: newId(),
    updated: Date.now(),
    title: "New conversation",
    system: settings.system ?? "",
    temperature: settings.temperature ?? null,
    maxTokens: settings.maxTokens ?? null,
    messages: [],
  };
}

/** Returns the title of a conversation that begins with a message. */
export function titleOf(text) {
  const line = text.trim().replace(/\s+/g, " ");
  return line.length <= TITLE_LENGTH ? line : `${line.slice(0, TITLE_LENGTH - 1)}…`;
}

/** Returns the kept conversations, the newest first, without entries that are not conversations. */
export function loadConversations() {
  const conversations = [];
  try {
    for (let index = 0; index < localStorage.length; index += 1) {
      const key = localStorage.key(index);
      if (key.startsWith(PREFIX)) {
        const conversation = parse(localStorage.getItem(key));
        if (conversation && key === PREFIX + conversation.id) {
          conversations.push(conversation);
        }
      }
    }
  } catch {
    // The browser has no storage for this page.
  }
  return conversations.sort((a, b) => b.updated - a.updated);
}

/** Keeps a conversation; returns false if the browser does not. */
export function saveConversation(conversation) {
  return attempt(() => {
    localStorage.setItem(PREFIX + conversation.id, JSON.stringify(conversation));
  });
}

/** Removes a conversation. */
export function removeConversation(id) {
  attempt(() => localStorage.removeItem(PREFIX + id));
}

/** Returns the id of the conversation in an entry of the storage; null if it is another entry. */
export function idOfKey(key) {
  return key.startsWith(PREFIX) ? key.slice(PREFIX.length) : null;
}

/** Returns the conversation that was shown last. */
export function loadCurrent() {
  return read(() => localStorage.getItem(CURRENT));
}

/** Keeps which conversation is shown. */
export function saveCurrent(id) {
  attempt(() => localStorage.setItem(CURRENT, id));
}

/** Returns the API key; it is kept as long as the tab is open. */
export function loadApiKey() {
  return read(() => sessionStorage.getItem(API_KEY)) ?? "";
}

/** Keeps the API key as long as the tab is open. */
export function saveApiKey(key) {
  attempt(() => sessionStorage.setItem(API_KEY, key));
}

function newId() {
  // `crypto.randomUUID` is missing on pages without TLS that are not of this machine.
  const bytes = crypto.getRandomValues(new Uint8Array(12));
  return Array.from(bytes, (byte) => byte.toString(16).padStart(2, "0")).join("");
}

function parse(text) {
  try {
    const conversation = { ...newConversation(), ...JSON.parse(text) };
    const isMessage = (message) =>
      typeof message.role === "string" && typeof message.content === "string";
    conversation.messages = conversation.messages.map((message) => ({ ...EMPTY, ...message }));
    return conversation.messages.every(isMessage) ? conversation : null;
  } catch {
    return null;
  }
}

function read(get) {
  try {
    return get();
  } catch {
    return null;
  }
}

function attempt(change) {
  try {
    change();
    return true;
  } catch {
    return false;
  }
}
