// Asks the server for the answer of a conversation.

import { streamChat } from "./client.js";

/**
 * Fills an answer as the server sends it, and calls `changed` after each change.
 *
 * `answer` is the last message of the conversation. Errors become its `error`; the status of the
 * error's response is returned, else 0.
 */
export async function fillAnswer(conversation, answer, { model, apiKey, signal, changed }) {
  const clock = new Clock();
  let status = 0;
  let finish = "";
  try {
    for await (const chunk of streamChat(request(conversation, model), apiKey, signal)) {
      const [choice] = chunk.choices;
      const { content, reasoning_content: reasoning } = choice?.delta ?? {};
      if (content || reasoning) {
        answer.content += content ?? "";
        answer.reasoning += reasoning ?? "";
        clock.tick();
        changed();
      }
      finish = choice?.finish_reason ?? finish;
      clock.tokens = chunk.usage?.completion_tokens ?? clock.tokens;
    }
  } catch (error) {
    if (error.name === "AbortError") {
      finish = "abort";
    } else {
      answer.error = error.message;
      status = error.status ?? 0;
    }
  }
  answer.running = false;
  answer.note = [ENDS[finish], clock.text()].filter(Boolean).join(" · ");
  changed();
  return status;
}

/** The shortest time from which a speed is computed, in milliseconds. */
const MIN_TIME = 50;
const ENDS = {
  abort: "Stopped",
  length: "Ended at the limit of tokens",
  tool_calls: "The model called a tool, which this page has not",
};

/**
 * Returns the body of the request: all messages before the answer.
 *
 * A question without an answer, because it failed or was stopped, is left out with it: it may be
 * what the server refuses, and templates want the roles in turn.
 */
function request(conversation, model) {
  const messages = [];
  if (conversation.system.trim() !== "") {
    messages.push({ role: "system", content: conversation.system });
  }
  for (const { role, content } of conversation.messages.slice(0, -1)) {
    if (role === "assistant" && content === "") {
      messages.pop();
    } else {
      messages.push({ role, content });
    }
  }
  const body = { model, messages };
  if (conversation.temperature !== null) {
    body.temperature = conversation.temperature;
  }
  if (conversation.maxTokens !== null) {
    body.max_tokens = conversation.maxTokens;
  }
  return body;
}

/** The times of an answer. */
class Clock {
  constructor() {
    this.start = performance.now();
    this.first = null;
    this.last = null;
    this.tokens = null;
  }

  tick() {
    this.last = performance.now();
    this.first ??= this.last;
  }

  /** Returns the times for a reader. */
  text() {
    if (this.first === null) {
      return "";
    }
    const parts = [`first text after ${seconds(this.first - this.start)}`];
    if (this.tokens !== null) {
      const plural = this.tokens === 1 ? "" : "s";
      parts.unshift(`${this.tokens} token${plural}`);
      const time = this.last - this.first;
      if (this.tokens > 1 && time > MIN_TIME) {
        parts.push(`${(((this.tokens - 1) * 1000) / time).toFixed(1)} tokens/s`);
      }
    }
    return parts.join(" · ");
  }
}

function seconds(milliseconds) {
  return milliseconds < 1000
    ? `${Math.round(milliseconds)} ms`
    : `${(milliseconds / 1000).toFixed(1)} s`;
}
