// The run's curves, and what people save of them.

import { chart, pictureOf } from "./chart.js";
import { choice, duration, el, empty, narrow, number } from "./dom.js";

const COLUMNS = ["step", "time", "loss", "tokens_per_second", "gradient_norm", "learning_rate", "predicted_over_measured", "busy", "cost"];
const GAP = 24;

export function curves(doc, width, chosen, pick) {
  if (!doc.losses.length && !doc.held_out.length) return empty("No curves yet: the first step is still to come.");
  const byTime = chosen.axis === "time", x = byTime ? 1 : 0;
  const xText = byTime ? (time) => duration(time - doc.began) : (step) => `step ${number(step)}`;
  const points = (rows, column) => rows.filter((row) => row[column] !== null).map((row) => [row[x], row[column]]);
  const series = (name, shade, rows, column, smoothed) => {
    const found = points(rows, column);
    return { name, kind: shade, points: found, smooth: smoothed && chosen.smooth === "smooth" && found.length > 20 ? smooth(found) : null };
  };
  const two = Math.floor((width - GAP) * 0.62), third = Math.floor((width - 2 * GAP) / 3), columns = width > 900;
  const draw = (title, all, wide, options = {}) => chart(title, all, columns ? wide : width, columns ? options.height ?? 200 : 180, xText, options);
  const first = [
    draw("Loss", [series("loss", "loss", doc.losses, 2, true), series("held out", "held", doc.held_out, 2, false)], two, { height: 240 }),
    draw("Speed", [series("tokens/s", "speed", doc.losses, 3, true)], width - GAP - two, { height: 240, zero: true }),
  ];
  const more = [
    draw("Gradient norm", [series("norm", "norm", doc.losses, 4, true)], third, { zero: true }),
    draw("Learning rate", [series("rate", "rate", doc.losses, 5, false)], third, { zero: true }),
    draw("Predicted over measured", [series("seconds a step", "ratio", doc.losses, 6, true)], third, { zero: true, level: 1 }),
  ];
  const shown = narrow() ? first.slice(0, 1) : first, folded = narrow() ? [...first.slice(1), ...more] : more;
  return [
    el("div", { class: "tools" },
      choice("Over", { steps: "over steps", time: "over time" }, chosen.axis, (axis) => pick({ axis })),
      choice("Lines", { smooth: "smooth", raw: "raw" }, chosen.smooth, (value) => pick({ smooth: value })),
      el("div", { class: "choice", role: "group", "aria-label": "Save" },
        el("button", { type: "button", "data-key": "csv", onclick: () => save(`${fileName(doc)}.csv`, "text/csv", csv(doc)) }, "Save CSV"),
        el("button", { type: "button", "data-key": "picture", onclick: () => savePicture(doc) }, "Save picture"))),
    el("div", { class: "charts" }, shown),
    narrow() ? el("details", { "data-keep": "curves" }, el("summary", { "data-key": "curves" }, "More curves: speed, gradient norm, learning rate, predicted over measured"), el("div", { class: "charts" }, folded))
      : el("div", { class: "charts" }, folded),
  ];
}

// The mean of the points around each, the nearer the more, which lags behind nothing. Where training went back, a new line begins.
function smooth(points) {
  const half = Math.max(3, Math.min(20, Math.round(points.length / 30))), lines = [[]];
  for (const point of points) {
    if (lines.at(-1).length && point[0] <= lines.at(-1).at(-1)[0]) lines.push([]);
    lines.at(-1).push(point);
  }
  return lines.flatMap((line) => line.map(([x], at) => {
    const wide = Math.min(half, at, line.length - 1 - at); // as many on both sides
    let sum = 0, weights = 0;
    for (let off = -wide; off <= wide; off += 1) {
      const weight = 1 + wide - Math.abs(off);
      sum += weight * line[at + off][1];
      weights += weight;
    }
    return [x, sum / weights];
  }));
}

const fileName = (doc) => (doc.head.name || "run").replace(/[^\w.-]+/g, "-");

function csv(doc) {
  const held = new Map(doc.held_out.map(([step, , loss]) => [step, loss]));
  const rows = doc.losses.map(([step, time, ...rest]) => [step, new Date(time * 1000).toISOString(), ...rest, held.get(step)]);
  for (const [step, time, loss] of doc.held_out) if (!doc.losses.some((row) => row[0] === step)) rows.push([step, new Date(time * 1000).toISOString(), ...COLUMNS.slice(2).map(() => ""), loss]);
  rows.sort((a, b) => (a[1] < b[1] ? -1 : a[1] > b[1] ? 1 : 0));
  return [[...COLUMNS, "held_out_loss"], ...rows].map((row) => row.map((value) => value ?? "").join(",")).join("\n") + "\n";
}

function save(name, type, text) {
  const link = el("a", { href: URL.createObjectURL(new Blob([text], { type })), download: name });
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 10_000);
}

function savePicture(doc) {
  const picture = pictureOf([...document.querySelectorAll("#curves figure")]);
  if (picture) save(`${fileName(doc)}.svg`, "image/svg+xml", picture);
}
