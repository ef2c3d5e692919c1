// What the model writes: the last text for each prompt of the run file. A member wrote it, and nobody checks it.

import { el, number } from "./dom.js";

export const textList = (texts) => texts.length > 0 && [
  el("h3", {}, "What the model writes"),
  texts.map(({ step, node, prompt, text, whole }) => el("figure", { class: "text" },
    el("blockquote", {}, el("b", {}, prompt), ` ${text}${whole ? "" : " …"}`),
    el("figcaption", { class: "quiet" }, `after step ${number(step)}, by ${node}`))),
];
