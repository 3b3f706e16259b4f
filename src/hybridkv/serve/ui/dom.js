// Elements without markup: text goes in as text nodes only.

const SVG = "http://www.w3.org/2000/svg";

function fill(element, props, children) {
  for (const [name, value] of Object.entries(props ?? {})) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name === "style") for (const [key, v] of Object.entries(value)) element.style.setProperty(key, v);
    else element.setAttribute(name, value === true ? "" : String(value));
  }
  append(element, children);
  return element;
}

function append(element, children) {
  for (const child of children.flat(Infinity)) {
    if (child === null || child === undefined || child === false) continue;
    element.append(child instanceof Node ? child : document.createTextNode(String(child)));
  }
}

/** An HTML element. `props` are attributes; `onNAME` are listeners, `style` is an object of CSS properties. */
export function h(tag, props, ...children) {
  return fill(document.createElement(tag), props, children);
}

/** An SVG element, with the same `props`. */
export function s(tag, props, ...children) {
  return fill(document.createElementNS(SVG, tag), props, children);
}

/** Replaces what `element` contains. */
export function put(element, ...children) {
  element.replaceChildren();
  append(element, children);
  return element;
}

/** A table. `columns` are [title, class] pairs; a row is a list of cells. */
export function table(caption, columns, rows, props) {
  const head = h("tr", null, columns.map(([title, kind]) => h("th", { scope: "col", class: kind }, title)));
  const body = rows.map((row) => h("tr", null, row.map((cell, i) => h("td", { class: columns[i][1] }, cell))));
  return h("div", { class: "scroll", tabindex: "0", role: "group", "aria-label": caption },
    h("table", props, h("caption", { class: "visually-hidden" }, caption), h("thead", null, head), h("tbody", null, body)));
}

/** A value of the style sheet, such as `--accent`. */
export function cssColor(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
}
