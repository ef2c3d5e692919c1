// A map of the links between nodes.

import { choice, el, empty, number, rough } from "./dom.js";

export function linkMap(links, chosen, pick) {
  const known = links[chosen].flat().filter((value) => value > 0).map(Math.log), fast = chosen === "megabits";
  if (!known.length) return empty("No link has been measured yet.");
  const low = Math.min(...known), span = Math.max(...known) - low || 1, small = links.nodes.length > 14;
  const heat = (value) => (fast ? Math.log(value) - low : low + span - Math.log(value || Math.exp(low))) / span;
  const cell = (source, row, destination, column) => {
    const value = links[chosen][row][column], broken = links.megabits[row][column] === 0;
    if (row === column || value === null) return el("td");
    const said = broken ? "nothing passes" : `${rough(value)} ${fast ? "Mbit/s" : "ms"}`;
    return el("td", { class: broken ? "broken" : `q${Math.round(4 * heat(value))}`, title: `${source} to ${destination}: ${said}` }, small ? "" : broken ? "✕" : rough(value));
  };
  return [
    choice("Map of", { megabits: "bandwidth", milliseconds: "latency" }, chosen, pick),
    el("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": "Links, from the row's node to the column's" }, el("table", { class: small ? "map small" : "map" },
      el("thead", {}, el("tr", {}, el("th", { scope: "col" }, "from ↓ to →"), links.nodes.map((node) => el("th", { scope: "col", title: node }, node)))),
      el("tbody", {}, links.nodes.map((source, row) => el("tr", {}, el("th", { scope: "row", title: source }, source), links.nodes.map((destination, column) => cell(source, row, destination, column))))))),
    el("p", { class: "muted" }, fast ? "Mbit/s; the stronger the colour, the faster." : "Milliseconds one way; the stronger the colour, the nearer.",
      links.left_out > 0 && ` ${number(links.left_out)} more nodes are not shown.`),
  ];
}
