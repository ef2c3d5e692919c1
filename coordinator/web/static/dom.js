// Elements and words. Whatever a member said becomes a text node or an attribute, and never markup.

const SVG = "http://www.w3.org/2000/svg";

function build(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else node.setAttribute(name, value === true ? "" : value);
  }
  node.append(...children.flat(2).filter((child) => child !== null && child !== undefined && child !== false));
  return node;
}

export const el = (tag, attributes = {}, ...children) => build(document.createElement(tag), attributes, children);
export const svg = (tag, attributes = {}, ...children) => build(document.createElementNS(SVG, tag), attributes, children);

export const empty = (text) => el("p", { class: "empty" }, text);

export function number(value, digits = 0) {
  return value === null || value === undefined ? "–" : value.toLocaleString("en", { minimumFractionDigits: digits, maximumFractionDigits: digits });
}

export function rough(value) {
  if (value === null || value === undefined) return "–";
  return value.toLocaleString("en", { maximumSignificantDigits: Math.abs(value) >= 1000 ? 4 : 3 });
}

export function duration(seconds) {
  if (seconds === null || seconds === undefined) return "–";
  const whole = Math.round(seconds), days = Math.floor(whole / 86400), hours = Math.floor(whole / 3600) % 24, minutes = Math.floor(whole / 60) % 60;
  if (days) return `${days} d ${hours} h`;
  if (hours) return `${hours} h ${minutes} min`;
  return minutes ? `${minutes} min ${whole % 60} s` : `${whole} s`;
}

export const clock = (time) => new Date(time * 1000).toLocaleTimeString("en-GB");
const minutes = (time) => new Date(time * 1000).toLocaleTimeString("en-GB", { hour: "2-digit", minute: "2-digit" });
const date = (time) => new Date(time * 1000).toLocaleDateString("en-GB", { weekday: "short", day: "numeric", month: "short" });
// A time of day, with the day where that is not the day of ``now``.
export const when = (time, now) => (date(time) === date(now) ? minutes(time) : `${date(time)}, ${minutes(time)}`);
export const dayAndTime = (time) => `${date(time)}, ${minutes(time)}`;
export const money = (value, currency) => (/^[^A-Za-z\d\s]$/.test(currency) ? currency + number(value, 2) : `${number(value, 2)} ${currency}`.trim());
export const narrow = () => window.matchMedia("(max-width: 640px)").matches;
export const cut = (text, most) => (text.length <= most ? text : `${text.slice(0, most - 1)}…`);
export const layers = ([first, past]) => (past - first > 1 ? `layers ${first}–${past - 1}` : `layer ${first}`);
export const stageClass = (stage) => `stage${stage % 6}`;

const DOING = { measuring: "measuring its links", switching: "taking up a plan", ready: "standby or idle", relays: "relaying" };
export const words = ({ doing, place }) => (doing === "training" ? place : DOING[doing] ?? doing);
export const kind = ({ doing, stage }) => (doing === "training" ? stageClass(stage) : doing);

// A bar of which a part is filled. Its width is set by script, as the page's policy allows no inline style.
export function bar(part, kind, label, name = "") {
  const filled = el("span", { class: `fill ${kind}` });
  filled.style.width = `${Math.round(100 * Math.max(0, Math.min(1, part)))}%`;
  return el("span", { class: `bar ${name}`, title: label, role: "img", "aria-label": label }, filled);
}

// Heads are texts, or [text, class]; rows have a cell for each.
export function table(heads, rows, caption) {
  const named = heads.map((head) => (Array.isArray(head) ? head : [head, ""]));
  return el("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": caption },
    el("table", {},
      el("thead", {}, el("tr", {}, named.map(([text, kind]) => el("th", { scope: "col", class: kind }, text)))),
      el("tbody", {}, rows.map((row) => el("tr", {}, row.map((cell, index) => el(index ? "td" : "th", { scope: index ? null : "row", class: named[index][1] }, cell)))))));
}

// Buttons of which one is pressed; ``pick`` gets what the other ones stand for.
export function choice(label, options, chosen, pick) {
  return el("div", { class: "choice", role: "group", "aria-label": label }, Object.entries(options).map(([value, text]) =>
    el("button", { type: "button", "data-key": `${label}-${value}`, "aria-pressed": String(value === chosen), onclick: () => pick(value) }, text)));
}

// The first ones, and a button that shows all.
export function few(all, most, key, open, toggle) {
  const button = all.length > most && el("button", { type: "button", class: "more", "data-key": key, onclick: toggle }, open ? "Show fewer" : `Show all ${number(all.length)}`);
  return [open ? all : all.slice(0, most), button];
}
