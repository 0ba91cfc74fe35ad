// Makes elements. Texts become text nodes, never HTML.

/** Returns an element with attributes and children; strings become text nodes. */
export function element(tag, attributes = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    node.setAttribute(name, value);
  }
  node.append(...children);
  return node;
}

/** Returns a button of type `button` that calls `action`. */
export function button(text, attributes, action) {
  const node = element("button", { type: "button", ...attributes }, text);
  node.addEventListener("click", action);
  return node;
}

/** Returns the element of the page with an id. */
export function byId(id) {
  return document.getElementById(id);
}
