// Who takes part: the nodes, what each has given, and one node in detail.

import { nodeButtons } from "./direct.js";
import { bar, duration, el, empty, few, kind, layers, narrow, number, rough, table, words } from "./dom.js";

const MOST = 40, MOST_ON_A_PHONE = 6, GAVE = 12, GAVE_ON_A_PHONE = 3;

const gibibytes = (device) => `${rough(device.memory_bytes / 2 ** 30)} GiB`;
const seconds = (value) => `${rough(value)} s`;
const spent = (node) => `computed ${seconds(node.busy)}, waited ${seconds(node.waited)}`;
const gave = (one) => `${number(one.micro_batches)} micro-batches in ${number(one.steps)} steps, ${duration(one.computed)} of computing`;
const now = (gpu) => [gpu.load !== null && `${Math.round(100 * gpu.load)}% busy`, gpu.celsius !== null && `${Math.round(gpu.celsius)} °C`].filter(Boolean).join(", ");
const idle = (node) => node.idle && `${node.idle.why}${node.idle.remedy ? `. It would help: ${node.idle.remedy}` : ""}`;

// Those of whom there is something to say come first.
const urgency = (node) => (node.slow ? 0 : node.doing === "quarantined" ? 1 : node.idle ? 2 : 3);

export function nodeTable(doc, open, all) {
  if (!doc.nodes.length) return empty("No node is here. dtfm-coordinator invite prints the line for one.");
  const small = narrow(), busy = doc.nodes.some((node) => node.gpu);
  const heads = ["Node", ["Does", "does"], ["Micro-batches", "n wide"], "Computed in the last step", ["Planned", "n wide"], ["Device", "wide"], ["Memory", "n wide"], ["GFLOP/s planned with", "n wide"], busy && ["GPU now", "wide"], ["Standing", "wide"]].filter(Boolean);
  const [shown, more] = few([...doc.nodes].sort((a, b) => urgency(a) - urgency(b)), small ? MOST_ON_A_PHONE : MOST, "all-nodes", all.is, all.toggle);
  const rows = shown.map((node) => [
    el("button", { type: "button", class: "name", "data-key": `node-${node.node}`, onclick: () => open(node.node) }, node.node),
    [el("i", { class: kind(node) }), node.idle ? "idle" : words(node)],
    node.load ? `${number(node.load)} of ${number(node.of_stage)}` : "",
    lastStep(node),
    node.planned == null ? "" : [seconds(node.planned), node.slow && el("b", { class: "slow" }, ` takes ${node.slow.toFixed(1)}×`)],
    node.device?.name, node.device && gibibytes(node.device), node.device && rough(node.flops / 1e9),
    ...(busy ? [node.gpu ? now(node.gpu) : ""] : []),
    node.standing.word,
  ]);
  return [table(heads, rows, "Nodes"), more, doc.left_out > 0 && el("p", { class: "muted" }, `and ${number(doc.left_out)} more`)];
}

function lastStep(node) {
  if (node.load && node.busy != null) return el("span", { class: "step" },
    bar(node.busy / (node.busy + node.waited || 1), kind(node), spent(node)),
    el("small", {}, `${seconds(node.busy)} of ${seconds(node.busy + node.waited)}`, node.slow && narrow() && el("b", { class: "slow" }, ` ${node.slow.toFixed(1)}× planned`)));
  return "";
}

export function given(doc, all) {
  const { contributions } = doc;
  if (!contributions.length) return empty("Nothing yet: this fills with each step.");
  const most = contributions[0].share || 1, over = doc.head.over !== null;
  const [shown, more] = few(contributions, narrow() ? GAVE_ON_A_PHONE : GAVE, "all-given", all.is, all.toggle);
  return [el("ol", { class: "given" }, shown.map((one) => el("li", { class: one.present || over ? "" : "left" },
    el("span", { class: "name" }, one.node, !one.present && !over && el("small", {}, " has left")),
    bar(one.share / most, "", `${rough(100 * one.share)}% of all micro-batches`),
    el("b", {}, `${rough(100 * one.share)}%`), el("span", { class: "muted" }, over && one.device ? `${one.device}: ` : "", gave(one))))), more];
}

export function nodeDetail(doc, name, directs) {
  const node = doc.nodes.find((one) => one.node === name), one = doc.contributions.find((each) => each.node === name);
  const facts = {
    Does: node.layers ? `${words(node)}, ${layers(node.layers)}, ${number(node.load)} of ${number(node.of_stage)} micro-batches a step` : words(node),
    Idle: idle(node),
    Leaving: node.leaving,
    Device: node.device && `${node.device.name} (${node.device.kind}), ${gibibytes(node.device)}`,
    "GPU now": node.gpu && now(node.gpu),
    Speed: node.device && `${rough(node.flops / 1e9)} GFLOP/s, as plans count on; ${rough(node.device.flops / 1e9)} when it was timed beside no other work`,
    "Last step": node.load && node.busy != null && `${spent(node)}${node.planned == null ? "" : `; planned ${seconds(node.planned)}`}${node.slow ? `; it takes ${node.slow.toFixed(1)} times that` : ""}`,
    Reached: node.reached,
    Sends: node.sends,
    Standing: `${node.standing.word}: ${node.standing.reason}`,
    Gave: one && gave(one),
  };
  return [el("dl", { class: "facts" }, Object.entries(facts).filter(([, text]) => text).map(([what, text]) => [el("dt", {}, what), el("dd", {}, text)])),
    directs && nodeButtons(name, node.doing === "quarantined")];
}
