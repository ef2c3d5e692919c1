// The plan: a column for each stage, a card for each replica, and what flows between them. Islands are one below the other.

import { bar, cut, el, empty, layers, narrow, number, rough, stageClass, svg, table, words } from "./dom.js";

const CARD = 46, GAP = 10, HEAD = 40, MOST_CARDS = 16, MOST_CARDS_ON_A_PHONE = 5;

export function planGraph(plan, nodes, width, open) {
  const most = narrow() ? MOST_CARDS_ON_A_PHONE : MOST_CARDS;
  const byName = new Map(nodes.map((node) => [node.node, node]));
  const columns = 1 + Math.max(...plan.stages.map((stage) => stage.column)), card = Math.max(122, Math.min(250, (width / columns) * 0.72));
  const between = columns > 1 ? Math.max(34, Math.min(400, (width - card * columns - 2) / (columns - 1))) : 0;
  const whole = card * columns + between * (columns - 1) + 2;
  const places = plan.stages.map((stage) => new Map());
  const cards = [];
  let rows = 0, top = 0;
  plan.stages.forEach((stage, index) => {
    if (index && stage.column === 0) { top += HEAD + rows * (CARD + GAP) + 16; rows = 0; }
    const x = 1 + stage.column * (card + between);
    const shown = stage.replicas.slice(0, most);
    cards.push(svg("text", { class: "column", x, y: top + 14 }, stage.name[0].toUpperCase() + stage.name.slice(1)), svg("text", { class: "tick", x, y: top + 29 }, layers(stage.layers)));
    const taken = (heirs) => heirs.map(([heir, count]) => `${count} to ${heir}`).join(", ") || "it had nothing to do";
    const seats = [...shown.map(([node, load]) => [node, load, ""]), ...stage.lost.map(([node, heirs]) => [node, 0, taken(heirs)])];
    seats.forEach(([node, load, lost], row) => {
      const y = top + HEAD + row * (CARD + GAP);
      places[index].set(node, { x, y: y + CARD / 2 });
      cards.push(seat(node, load, lost, byName.get(node), index, x, y, card, open));
    });
    rows = Math.max(rows, seats.length);
    if (stage.replicas.length > shown.length) cards.push(svg("text", { class: "tick", x, y: top + HEAD + seats.length * (CARD + GAP) + 10 }, `and ${stage.replicas.length - shown.length} more`));
  });
  const heaviest = Math.max(1, ...plan.flows.map((flow) => flow.micro_batches));
  const counts = plan.flows.length <= 12;
  const flows = plan.flows.map((flow) => {
    const from = places[flow.stage].get(flow.sender), to = places[flow.stage + 1].get(flow.receiver);
    if (!from || !to) return null;
    const x0 = from.x + card, x1 = to.x, middle = (x0 + x1) / 2;
    const label = counts && svg("text", { class: "load", x: x0 + (x1 - x0) * 0.3, y: from.y + (to.y - from.y) * 0.22 - 6, "text-anchor": "middle" }, flow.micro_batches);
    const path = `M${x0} ${from.y}C${middle} ${from.y} ${middle} ${to.y} ${x1} ${to.y}`;
    return svg("g", {},
      svg("path", { class: `flow ${stageClass(flow.stage)}`, "stroke-width": (1.5 + (7 * flow.micro_batches) / heaviest).toFixed(1), d: path },
        svg("title", {}, `${flow.sender} to ${flow.receiver}: ${flow.micro_batches} micro-batches a step${flow.codec ? `, ${flow.codec}` : ""}`)), label || null);
  });
  const height = top + HEAD + rows * (CARD + GAP) + (plan.stages.some((stage) => stage.replicas.length > most) ? 16 : 0);
  const said = plan.stages.map((stage) => `${stage.name}, ${layers(stage.layers)}: ${stage.replicas.map(([node]) => cut(node, 40)).join(", ")}`).join("; ");
  return el("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": `Plan ${plan.generation}` },
    svg("svg", { class: "plan", width: whole, height, viewBox: `0 0 ${whole} ${height}`, role: open ? "group" : "img", "aria-label": `Plan ${plan.generation}: ${said}` }, flows, cards));
}

function seat(node, load, lost, known, stage, x, y, card, open) {
  const works = known && known.busy != null ? known.busy / (known.busy + known.waited || 1) : null;
  const letters = Math.floor((card - 18) / 7.2);
  const second = lost ? `lost; ${lost}` : `${number(load)} micro-batch${load === 1 ? "" : "es"}`;
  const pressed = (key) => { if (key.key === "Enter" || key.key === " ") { key.preventDefault(); open(node); } };
  const able = open && known && { class: "seat able", tabindex: 0, role: "button", "data-key": `seat-${node}`,
    "aria-label": `${node}, ${second}`, onclick: () => open(node), onkeydown: pressed };
  return svg("g", able || { class: "seat" },
    svg("rect", { class: lost ? "card gone" : "card", x, y, width: card, height: CARD, rx: 6 }),
    svg("rect", { class: lost ? "gone" : stageClass(stage), x, y: y + 6, width: 3, height: CARD - 12, rx: 1.5 }),
    svg("text", { class: "name", x: x + 12, y: y + 19 }, cut(node, letters)),
    svg("text", { class: "tick", x: x + 12, y: y + 34 }, cut(second, Math.floor((card - 18) / 5.9))),
    works !== null && svg("rect", { class: "track", x: x + 12, y: y + CARD - 6, width: card - 24, height: 2 }),
    works !== null && svg("rect", { class: stageClass(stage), x: x + 12, y: y + CARD - 6, width: ((card - 24) * works).toFixed(1), height: 2 }),
    svg("title", {}, `${cut(node, 100)}: ${second}${works !== null ? `, computed ${Math.round(100 * works)}% of the last step` : ""}`));
}

export function planView(doc, width, open, plans) {
  const { plan } = doc, list = doc.plans.length > 0 ? el("div", { class: "beside" }, plans) : null;
  const none = doc.head.members ? "No plan is in force: the nodes join, read the data and measure their links first." : "No plan is in force, as no node is here.";
  if (!plan) return [empty(none), list];
  const parts = [planGraph(plan, doc.nodes, width, open)];
  const seconds = [["no plan can take less", plan.bound, "bound"], ["expected", plan.predicted, "expected"], ["the last steps took", plan.measured, "measured"]].filter(([, value]) => value);
  const longest = Math.max(...seconds.map(([, value]) => value));
  if (seconds.length) parts.push(el("div", { class: "seconds" }, el("h3", {}, "Seconds a step"),
    seconds.map(([name, value, kind]) => el("div", { class: "row" }, el("span", {}, name), bar(value / longest, kind, `${name} ${rough(value)} seconds`), el("b", {}, `${rough(value)} s`)))));
  const others = doc.nodes.filter((node) => node.stage === null && node.device);
  if (others.length) parts.push(el("h3", {}, "Not in the plan"), el("ul", { class: "idle" }, others.map((node) => el("li", {}, el("b", { class: "name" }, node.node),
    node.leaving ? ` is leaving: ${node.leaving}` : node.idle ? ` is idle: ${node.idle.why}. ` : ` is ${words(node)}`,
    node.idle && node.idle.remedy && el("span", { class: "muted" }, `It would help: ${node.idle.remedy}.`)))));
  parts.push(list);
  if (plan.flows.length) parts.push(el("details", { "data-keep": "flows" }, el("summary", { "data-key": "flows" }, `Flows, link by link (${plan.flows.length})`),
    table(["From", "To", ["Micro-batches", "n"], ["MB a step", "n"], "Codec", ["ms", "n"], ["Mbit/s", "n"]],
      plan.flows.map((flow) => [flow.sender, flow.receiver, flow.micro_batches, rough(flow.megabytes), flow.codec || "–", rough(flow.milliseconds), rough(flow.megabits)]), "Flows")));
  return parts;
}

// Who is elsewhere under the other plan, in words.
export function moves(before, after) {
  const place = (plan) => new Map((plan ? plan.stages : []).flatMap((stage) => stage.replicas.map(([node]) => [node, `${stage.name}, ${layers(stage.layers)}`])));
  const [old, now] = [place(before), place(after)];
  return [...new Set([...old.keys(), ...now.keys()])].filter((node) => old.get(node) !== now.get(node))
    .map((node) => [node, old.get(node) || "not in the plan", now.get(node) || "not in the plan"]);
}
