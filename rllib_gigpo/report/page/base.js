"use strict";
// Building blocks. Text enters the page through textContent alone, so it cannot become markup.

const SVG = "http://www.w3.org/2000/svg";

function element(name, attributes = {}, ...children) {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (key === "class") made.className = value;
    else if (key.startsWith("on")) made.addEventListener(key.slice(2), value);
    else made.setAttribute(key, value === true ? "" : String(value));
  }
  made.append(...children.map(asNode));
  return made;
}

function shape(name, attributes = {}, text) {
  const made = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, String(value));
  if (text !== undefined) made.textContent = text;
  return made;
}

function asNode(child) {
  return child instanceof Node ? child : document.createTextNode(String(child));
}

function replace(target, ...children) {
  target.replaceChildren(...children.map(asNode));
}

function byId(id) {
  return document.getElementById(id);
}

function isNumber(value) {
  return typeof value === "number" && Number.isFinite(value);
}

function readable(value, digits = 3) {
  if (!isNumber(value)) return "–";
  const size = Math.abs(value);
  if (size >= 1e9) return trimmed(value / 1e9) + " G";
  if (size >= 1e6) return trimmed(value / 1e6) + " M";
  if (size >= 1e4) return trimmed(value / 1e3) + " k";
  if (Number.isInteger(value)) return String(value);
  if (size !== 0 && size < 1e-3) return value.toExponential(1);
  return String(Number(value.toPrecision(digits)));
}

function trimmed(value) {
  return String(Number(value.toPrecision(3)));
}

function percent(value) {
  return isNumber(value) ? (100 * value).toFixed(value > 0 && value < 0.1 ? 1 : 0) + " %" : "–";
}

function signed(value) {
  if (!isNumber(value)) return element("span", { class: "muted" }, "–");
  const text = (value > 0 ? "+" : value < 0 ? "−" : "") + Math.abs(value).toFixed(3);
  return element("span", { class: value > 0 ? "plus" : value < 0 ? "minus" : "muted" }, text);
}

function mean(values) {
  const known = values.filter(isNumber);
  return known.length ? known.reduce((sum, value) => sum + value, 0) / known.length : null;
}

function shown(value) {
  if (value === null || value === undefined) return "none";
  return typeof value === "object" ? JSON.stringify(value) : String(value);
}

// A table from a header and rows; cells are texts or nodes, and `numeric` columns stand right.
function table(header, rows, numeric = new Set()) {
  const cell = (kind, value, place) =>
    element(kind, { class: numeric.has(place) ? "n" : "wrap" }, value);
  return element(
    "table",
    {},
    element("thead", {}, element("tr", {}, ...header.map((name, i) => cell("th", name, i)))),
    element("tbody", {}, ...rows.map((row) =>
      element("tr", {}, ...row.map((value, i) => cell("td", value, i))))),
  );
}
