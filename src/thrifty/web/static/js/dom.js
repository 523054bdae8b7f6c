// Elements from plain values. Text always becomes a text node: nothing of the database is ever read as markup.

import { brief, number } from "./format.js";

export function h(tag, props = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(props)) {
    if (value === undefined || value === null || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name === "class") element.className = value;
    else if (name === "value") element.value = value;
    else element.setAttribute(name, value === true ? "" : String(value));
  }
  add(element, children);
  return element;
}

export function add(element, children) {
  for (const child of children.flat(Infinity)) {
    if (child === undefined || child === null || child === false) continue;
    element.append(child instanceof Node ? child : document.createTextNode(String(child)));
  }
}

export function fill(element, ...children) {
  element.replaceChildren();
  add(element, children);
}

// A rounded number; its title has all digits.
export function figure(x) {
  const text = number(x);
  return text === "–" ? text : h("span", { title: x }, text);
}

// A configuration's value with rounded numbers; its title is the value as it was written.
export const written = (text) =>
  text === null || text === undefined ? "–" : h("span", { title: text }, brief(text));

export function badge(state) {
  const known = ["running", "done", "failed", "stopped", "interrupted", "waiting", "paused"];
  return h("span", { class: `badge ${known.includes(state) ? state : ""}` }, state);
}

export function card(title, note, ...children) {
  return h(
    "section",
    { class: "card" },
    h("header", {}, h("h2", {}, title), note && h("p", { class: "note" }, note)),
    children,
  );
}

export function tile(label, value, hint, extra = "") {
  return h(
    "dl",
    { class: `tile ${extra}` },
    h("dt", {}, label),
    h("dd", {}, value),
    hint && h("dd", { class: "hint" }, hint),
  );
}

export function empty(title, text) {
  return h("p", { class: "empty" }, h("strong", {}, title), text);
}

// What a view shows once it has something to show; its elements are made once, and stay.
export class Panel {
  #root;
  #children;
  #shown = false;

  constructor(root, ...children) {
    this.#root = root;
    this.#children = children;
  }

  // Says whether it was not there before.
  show() {
    if (this.#shown) return false;
    fill(this.#root, this.#children);
    this.#shown = true;
    return true;
  }

  empty(title, text) {
    fill(this.#root, empty(title, text));
    this.#shown = false;
  }
}

export function sortable(label, { key, state, change, numeric = false }) {
  const sorted = state.key === key ? (state.down ? "descending" : "ascending") : "none";
  const down = state.key === key ? !state.down : numeric;
  return h(
    "th",
    { "aria-sort": sorted, scope: "col", class: numeric ? "num" : "" },
    h("button", { type: "button", onclick: () => change({ key, down }) }, label),
  );
}
