// A part of Markdown as elements: paragraphs, headings, lists, code blocks, inline code, bold and
// emphasis. All else, HTML and links included, stays text.

import { button, element } from "./dom.js";

const MAX_DEPTH = 6;
const FENCE = /^ {0,3}(`{3,}|~{3,})([^`]*)$/s;
const HEADING = /^ {0,3}(#{1,6})[ \t]+(.*)$/s;
const RULE = /^ {0,3}([-*_])( *\1){2,} *$/;
const ITEM = /^( *)([-*+]|\d{1,9}[.)])( +|$)(.*)$/s;
const COPIED_TIME = 1500;

/** Divides a text into blocks. `source` is the text of a block, which tells whether it changed. */
export function parse(text) {
  const lines = text.replaceAll("\r\n", "\n").split("\n");
  const blocks = [];
  let index = 0;
  while (index < lines.length) {
    if (isBlank(lines[index])) {
      index += 1;
      continue;
    }
    const [block, end] = parseBlock(lines, index);
    block.source = lines.slice(index, end).join("\n");
    blocks.push(block);
    index = end;
  }
  return blocks;
}

/** Returns the block that begins at a line, and the line after it. */
function parseBlock(lines, start) {
  const fence = FENCE.exec(lines[start]);
  if (fence) {
    return parseCode(lines, start, fence);
  }
  const heading = HEADING.exec(lines[start]);
  if (heading) {
    return [{ kind: "heading", level: heading[1].length, text: heading[2] }, start + 1];
  }
  if (RULE.test(lines[start])) {
    return [{ kind: "rule" }, start + 1];
  }
  if (ITEM.test(lines[start])) {
    return parseList(lines, start);
  }
  let end = start + 1;
  while (end < lines.length && !isBlank(lines[end]) && !startsBlock(lines[end])) {
    end += 1;
  }
  return [{ kind: "paragraph", text: lines.slice(start, end).join("\n") }, end];
}

function parseCode(lines, start, [, fence, language]) {
  let end = start + 1;
  const closes = (line) => {
    const text = line.trim();
    return text.length >= fence.length && text === fence[0].repeat(text.length);
  };
  while (end < lines.length && !closes(lines[end])) {
    end += 1;
  }
  const text = lines.slice(start + 1, end).join("\n");
  const block = { kind: "code", language: language.trim(), text };
  return [block, Math.min(end + 1, lines.length)];
}

function parseList(lines, start) {
  const first = ITEM.exec(lines[start]);
  const indent = first[1].length;
  const ordered = isOrdered(first[2]);
  const items = [];
  let end = start;
  let afterBlank = false;
  while (end < lines.length) {
    const line = lines[end];
    const item = RULE.test(line) ? null : ITEM.exec(line);
    if (isBlank(line)) {
      items.at(-1)?.push("");
      afterBlank = true;
    } else if (item && item[1].length < indent + 2) {
      if (item[1].length < indent || isOrdered(item[2]) !== ordered) {
        break;
      }
      items.push([item[4]]);
      afterBlank = false;
    } else if (indentOf(line) >= indent + 2) {
      const content = indent + first[2].length + 1;
      items.at(-1).push(dedent(line, content));
      afterBlank = false;
    } else if (!afterBlank && !startsBlock(line)) {
      items.at(-1).push(line.trim());
    } else {
      break;
    }
    end += 1;
  }
  const number = ordered ? Number.parseInt(first[2], 10) : null;
  return [{ kind: "list", number, items: items.map((item) => item.join("\n")) }, end];
}

function isOrdered(marker) {
  return marker.length > 1;
}

function isBlank(line) {
  return line.trim() === "";
}

/** Returns the columns of the white space before a line. */
function indentOf(line) {
  const space = line.slice(0, line.length - line.trimStart().length);
  return space.length + 3 * (space.split("\t").length - 1);
}

/** Removes white space of up to `columns` columns from the start of a line. */
function dedent(line, columns) {
  let index = 0;
  let column = 0;
  while (column < columns && /\s/.test(line[index] ?? "")) {
    column += line[index] === "\t" ? 4 : 1;
    index += 1;
  }
  return line.slice(index);
}

function startsBlock(line) {
  return [FENCE, HEADING, RULE, ITEM].some((pattern) => pattern.test(line));
}

/** Returns the element of a block. */
function render(block, depth) {
  switch (block.kind) {
    case "code":
      return renderCode(block);
    case "heading": {
      // The page's own headings are of the levels above.
      const node = element(`h${Math.min(block.level + 3, 6)}`);
      appendInline(node, block.text, 0);
      return node;
    }
    case "rule":
      return element("hr");
    case "list": {
      const node = block.number === null ? element("ul") : element("ol", { start: block.number });
      node.append(...block.items.map((item) => renderItem(item, depth + 1)));
      return node;
    }
    default: {
      const node = element("p");
      appendInline(node, block.text, 0);
      return node;
    }
  }
}

function renderItem(text, depth) {
  const node = element("li");
  if (depth > MAX_DEPTH) {
    node.append(text);
    return node;
  }
  const blocks = parse(text);
  for (const block of blocks) {
    if (block.kind === "paragraph" && blocks[0] === block) {
      appendInline(node, block.text, 0);
    } else {
      node.append(render(block, depth));
    }
  }
  return node;
}

function renderCode(block) {
  const code = element("code", {}, block.text);
  const name = block.language || "code";
  const copy = button("Copy", { "aria-label": `Copy ${name}` }, () => copyText(copy, code));
  const bar = element("div", { class: "code-bar" }, element("span", {}, name), copy);
  const pre = element("pre", { tabindex: "0", "aria-label": name }, code);
  return element("div", { class: "code" }, bar, pre);
}

async function copyText(copy, code) {
  let done;
  try {
    await navigator.clipboard.writeText(code.textContent);
    done = true;
  } catch {
    // Without TLS, and not on this machine, a page has no clipboard.
    getSelection().selectAllChildren(code);
    done = document.execCommand("copy");
  }
  copy.textContent = done ? "Copied" : "Not copied";
  setTimeout(() => {
    copy.textContent = "Copy";
  }, COPIED_TIME);
}

/** Appends a text with inline code, bold and emphasis. */
function appendInline(parent, text, depth) {
  const markers = /`+|\*{1,2}/g;
  // The markers that are not closed after here.
  const open = new Set();
  let plain = 0;
  let match;
  while ((match = markers.exec(text))) {
    const marker = match[0];
    const start = match.index + marker.length;
    const isCode = marker[0] === "`";
    if (open.has(marker) || (!isCode && isBlank(text[start] ?? ""))) {
      continue;
    }
    const end = findClosing(text, marker, start);
    if (end < 0) {
      open.add(marker);
      continue;
    }
    parent.append(text.slice(plain, match.index));
    const inner = text.slice(start, end);
    if (isCode) {
      parent.append(element("code", {}, inner.trim() || inner));
    } else {
      const node = element(marker === "**" ? "strong" : "em");
      if (depth < MAX_DEPTH) {
        appendInline(node, inner, depth + 1);
      } else {
        node.append(inner);
      }
      parent.append(node);
    }
    plain = end + marker.length;
    markers.lastIndex = plain;
  }
  parent.append(text.slice(plain));
}

/** Returns where the marker that closes one before `start` is; -1 if there is none. */
function findClosing(text, marker, start) {
  const isCode = marker[0] === "`";
  let end = start;
  while ((end = text.indexOf(marker, end)) >= 0) {
    let length = marker.length;
    while (text[end + length] === marker[0]) {
      length += 1;
    }
    const closes = isCode
      ? length === marker.length
      : length % 2 === marker.length % 2 || length > 2;
    if (closes && end > start && (isCode || !isBlank(text[end - 1]))) {
      return isCode ? end : end + length - marker.length;
    }
    end += length;
  }
  return -1;
}

/** Shows a text that grows in an element. Blocks that did not change keep their elements. */
export class MarkdownView {
  constructor(container) {
    this.container = container;
    this.blocks = [];
  }

  /** Shows a text in the place of the one before. */
  update(text) {
    const blocks = parse(text);
    let same = 0;
    while (same < blocks.length && this.blocks[same]?.source === blocks[same].source) {
      same += 1;
    }
    if (blocks[same]?.kind === "code" && this.blocks[same]?.kind === "code") {
      // The button keeps the focus while the code grows.
      if (blocks[same].language === this.blocks[same].language) {
        const code = this.container.children[same].querySelector("pre code");
        code.textContent = blocks[same].text;
        same += 1;
      }
    }
    while (this.container.children.length > same) {
      this.container.lastElementChild.remove();
    }
    this.container.append(...blocks.slice(same).map((block) => render(block, 0)));
    this.blocks = blocks;
  }
}
