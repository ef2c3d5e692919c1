// The verdict, and the run in figures.

import { bar, dayAndTime, duration, el, money, number, rough, when } from "./dom.js";

const UNPRICED = "dtfm-coordinator set cluster.prices='{\"RTX 4090\" = 0.35}' cluster.currency=EUR";

const told = ({ text, since }, now) => text + (since ? `, since ${when(since, now)}` : "");

export function verdict(head, now) {
  const [first, ...others] = head.conditions;
  return [
    el("p", { class: `verdict ${first.mood}` }, el("i", { class: first.mood }), told(first, now)),
    others.length > 0 && el("ul", { class: "also" }, others.map((each) => el("li", {}, el("i", { class: each.mood }), told(each, now)))),
  ];
}

export const verdictText = (head, now) => told(head.conditions[0], now);

export function figures(head, now) {
  const figure = (name, value, small = "") => el("div", { class: "figure" }, el("dt", {}, name), el("dd", {}, value, el("small", {}, small)));
  const part = head.steps ? head.step / head.steps : 0, { currency } = head;
  return [
    el("dl", {},
      figure("Step", number(head.step), ` of ${number(head.steps)}`),
      figure(...ending(head)),
      figure("Loss", rough(head.loss), head.over ? " of the last step" : ` ${head.loss_is}`),
      figure("Held-out loss", rough(head.held_out), head.frequencies === null ? "" : ` frequencies alone ${rough(head.frequencies)}`),
      figure("Tokens/s", number(head.tokens_per_second)),
      figure("Lent", rough(head.node_hours), ` node-hours${head.over ? "" : `, ${number(head.members)} node${head.members === 1 ? "" : "s"} now`}`),
      head.has_prices && figure(head.over ? "Cost" : "Cost so far", money(head.cost, currency), cost(head))),
    bar(part, "", `${Math.round(100 * part)}% of the steps`, "progress"),
    !head.has_prices && head.name && !head.over && el("p", { class: "quiet" }, "What this costs: ", el("code", {}, UNPRICED)),
  ];
}

function ending(head) {
  if (head.over) return ["Ended", dayAndTime(head.over), ` after ${duration(head.elapsed)}`];
  if (head.ends === null) return ["Elapsed", head.elapsed ? duration(head.elapsed) : "–", head.state === "paused" ? " its end is not known while it is paused" : ""];
  return ["Ends", dayAndTime(head.ends), ` in ${duration(head.left)}, after ${duration(head.elapsed)}`];
}

function cost(head) {
  const { currency } = head;
  if (head.over) return "";
  const parts = [`${money(head.hourly_price, currency)} an hour`];
  if (head.whole_cost !== null) parts.push(`about ${money(head.whole_cost, currency)} in all`);
  if (head.unpriced) parts.push(`${number(head.unpriced)} node${head.unpriced === 1 ? " has" : "s have"} no price`);
  return ` ${parts.join(", ")}`;
}
