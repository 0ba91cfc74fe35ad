// The messages of a conversation.

import { byId, element } from "./dom.js";
import { MarkdownView } from "./markdown.js";

/** How near to its end the log must be to follow a growing answer, in pixels. */
const FOLLOW_DISTANCE = 60;

/** Shows the messages of one conversation at a time. */
export class MessageLog {
  constructor() {
    this.log = byId("log");
    this.announcer = new Announcer(byId("announcements"));
    this.views = new Map();
    this.pending = new Set();
  }

  /** Shows the messages of a conversation in the place of the one before. */
  show(messages) {
    this.views = new Map(messages.map((message) => [message, new MessageView(message)]));
    this.log.replaceChildren(...[...this.views.values()].map((view) => view.node));
    this.announcer.clear();
    byId("empty").hidden = messages.length > 0;
    this.#scrollToEnd();
  }

  /** Adds a message at the end. */
  add(message) {
    const view = new MessageView(message);
    this.views.set(message, view);
    this.log.append(view.node);
    byId("empty").hidden = true;
    this.#scrollToEnd();
  }

  /** Shows a change of a message before the next frame is drawn, if it is of this conversation. */
  update(message) {
    if (!this.views.has(message)) {
      return;
    }
    if (this.pending.size === 0) {
      // A page that is not seen has no frames.
      const later = document.hidden ? (draw) => setTimeout(draw, 200) : requestAnimationFrame;
      later(() => this.#draw());
    }
    this.pending.add(message);
  }

  #draw() {
    const { scrollHeight, scrollTop, clientHeight } = this.log;
    const follows = scrollHeight - scrollTop - clientHeight < FOLLOW_DISTANCE;
    for (const message of this.pending) {
      const view = this.views.get(message);
      view?.update(message);
      if (view) {
        this.announcer.follow(message, view.blocks());
      }
    }
    this.pending.clear();
    if (follows) {
      this.#scrollToEnd();
    }
  }

  #scrollToEnd() {
    this.log.scrollTop = this.log.scrollHeight;
  }
}

/** The elements of a message. */
class MessageView {
  constructor(message) {
    const isUser = message.role === "user";
    const name = element("h3", {}, isUser ? "You" : "Assistant");
    this.node = element("article", { class: `message ${isUser ? "user" : "assistant"}` }, name);
    if (isUser) {
      this.node.append(element("p", { class: "text" }, message.content));
      return;
    }
    const summary = element("summary", {}, "Reasoning");
    this.reasoning = element("div", { class: "text" });
    this.details = element("details", { class: "reasoning" }, summary, this.reasoning);
    const content = element("div", { class: "markdown" });
    this.content = new MarkdownView(content);
    this.note = element("p", { class: "muted small note" });
    this.error = element("p", { class: "error" });
    this.node.append(this.details, content, this.error, this.note);
    this.update(message);
  }

  update(message) {
    if (message.role === "user") {
      return;
    }
    this.node.setAttribute("aria-busy", String(Boolean(message.running)));
    this.node.classList.toggle("waiting", Boolean(message.running) && message.content === "");
    this.details.hidden = !message.reasoning;
    if (this.reasoning.textContent !== message.reasoning) {
      this.reasoning.textContent = message.reasoning;
    }
    this.content.update(message.content);
    this.note.textContent = message.note;
    this.error.textContent = message.error;
    this.note.hidden = !message.note;
    this.error.hidden = !message.error;
  }

  /** The elements of the answer's blocks. */
  blocks() {
    return this.content?.container.children ?? [];
  }
}

/** Tells readers of screens about an answer, block by block, when no more of a block will come. */
class Announcer {
  constructor(region) {
    this.region = region;
    this.clear();
  }

  clear() {
    this.region.replaceChildren();
    this.message = null;
    this.count = 0;
    this.ended = false;
  }

  follow(message, blocks) {
    if (this.message !== message) {
      this.clear();
      this.message = message;
      this.#say("The assistant answers.");
    } else if (this.ended) {
      return;
    }
    const complete = message.running ? blocks.length - 1 : blocks.length;
    for (; this.count < complete; this.count += 1) {
      this.#say(textOf(blocks[this.count]));
    }
    if (!message.running) {
      this.ended = true;
      this.#say(message.error || "The answer has ended.");
    }
  }

  #say(text) {
    this.region.append(element("p", {}, text));
  }
}

function textOf(block) {
  return (block.querySelector("pre") ?? block).textContent;
}
