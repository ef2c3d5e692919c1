// What happened, with a filter by how serious it is.

import { choice, el, empty, few, narrow, when } from "./dom.js";

const KINDS = {
  all: () => true,
  warnings: (kind) => kind === "warning" || kind === "problem",
  problems: (kind) => kind === "problem",
  plans: (kind) => kind === "plan",
};
const SAID = { info: "", plan: "plan", warning: "warning", problem: "problem" };
const MOST = 20, MOST_ON_A_PHONE = 3;

export function eventList(doc, chosen, pick, all) {
  const newest = [...doc.events].reverse(), count = (name) => newest.filter((one) => KINDS[name](one.kind)).length;
  const options = { all: "all", warnings: `warnings and problems (${count("warnings")})`, problems: `problems (${count("problems")})`, plans: `plans (${count("plans")})` };
  const [shown, more] = few(newest.filter((one) => KINDS[chosen](one.kind)), narrow() ? MOST_ON_A_PHONE : MOST, "all-events", all.is, all.toggle);
  return [
    choice("Show", options, chosen, pick),
    shown.length ? el("ol", { class: "events" }, shown.map((one) => el("li", { class: one.kind },
      el("time", { datetime: new Date(one.time * 1000).toISOString() }, when(one.time, doc.time)), el("span", {}, SAID[one.kind] && el("b", {}, `${SAID[one.kind]} `), one.said)))) : empty("Nothing of this kind."),
    more,
  ];
}
