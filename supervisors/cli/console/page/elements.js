// Elements, numbers and times for the other files. All text goes through text nodes: what a model wrote is never markup.

const SVG = "http://www.w3.org/2000/svg";

function fill(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (name === "on") for (const [event, handler] of Object.entries(value)) element.addEventListener(event, handler);
    else if (value !== null && value !== undefined && value !== false) element.setAttribute(name, value);
  }
  element.append(...children.filter((child) => child !== null && child !== undefined).map((child) =>
    child instanceof Node ? child : document.createTextNode(String(child))));
  return element;
}

export const el = (tag, attributes = {}, ...children) => fill(document.createElement(tag), attributes, children);
export const svg = (tag, attributes = {}, ...children) => fill(document.createElementNS(SVG, tag), attributes, children);
export const byId = (id) => document.getElementById(id);
export const say = (id, text) => { if (byId(id).textContent !== text) byId(id).textContent = text; };
export const empty = (text) => el("p", { class: "empty" }, text);

const known = (value) => typeof value === "number" && Number.isFinite(value);

/** A number for people: four digits, thousands apart, – for nothing. */
export function number(value, digits = 3) {
  if (!known(value)) return "–";
  const size = Math.abs(value);
  if (size >= 1e6) return `${(value / 1e6).toFixed(2)} M`;
  if (size >= 10000) return `${(value / 1000).toFixed(1)} k`;
  if (Number.isInteger(value)) return String(value);
  if (size !== 0 && size < 0.0005) return value.toExponential(1);
  return value.toFixed(size >= 100 ? 0 : size >= 10 ? 1 : digits);
}

export const share = (value) => (known(value) ? `${Math.round(100 * value)} %` : "–");

export function duration(seconds) {
  if (!known(seconds)) return "–";
  if (seconds < 1) return `${Math.round(seconds * 1000)} ms`;
  if (seconds < 60) return `${seconds.toFixed(seconds < 10 ? 1 : 0)} s`;
  if (seconds < 3600) return `${Math.floor(seconds / 60)} min ${Math.round(seconds % 60)} s`;
  if (seconds < 172800) return `${Math.floor(seconds / 3600)} h ${Math.round((seconds % 3600) / 60)} min`;
  return `${(seconds / 86400).toFixed(1)} days`;
}

export function clock(seconds) {
  if (!known(seconds)) return "";
  const time = new Date(seconds * 1000);
  const day = time.toDateString() === new Date().toDateString() ? "" : `${time.toLocaleDateString()} `;
  return day + time.toLocaleTimeString([], { hour12: false });
}

const tip = () => byId("tip");

export function showTip(event, lines) {
  const box = tip();
  box.replaceChildren(...lines.map((line, i) => el(i ? "div" : "strong", {}, line)));
  box.hidden = false;
  const room = document.documentElement.clientWidth - box.offsetWidth - 12;
  box.style.left = `${Math.max(4, Math.min(event.clientX + 14, room))}px`;
  box.style.top = `${Math.max(4, Math.min(event.clientY + 14, window.innerHeight - box.offsetHeight - 8))}px`;
}

export const hideTip = () => { tip().hidden = true; };

/** Draw again whenever `container` has another width. */
export function whenWidened(container, draw) {
  let width = 0;
  new ResizeObserver(() => {
    if (container.clientWidth !== width) { width = container.clientWidth; draw(); }
  }).observe(container);
}
