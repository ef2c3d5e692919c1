// What an operator asks of the coordinator: buttons that nobody else has.

import { el } from "./dom.js";

const answer = document.getElementById("answer");
const WEEK = 7 * 86400;

export async function isOperator() {
  const response = await fetch("ask/steer");
  return response.ok && (await response.json()).directs;
}

async function ask(what, fields) {
  answer.textContent = "…";
  try {
    const response = await fetch(`ask/${what}`, { method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify(fields) });
    const text = await response.text(), reply = response.ok ? JSON.parse(text) : {};
    const invited = reply.line && `For one machine, within a week: ${reply.line}`;
    answer.textContent = response.ok ? invited ?? reply.sentence ?? reply.reason : text;
  } catch (problem) {
    answer.textContent = `The coordinator does not answer (${problem.message}).`;
  }
}

const button = (text, act) => el("button", { type: "button", "data-key": text, onclick: act }, text);
// Asks, and closes the dialog that it was asked in.
const sure = (text, what, fields) => button(text, ({ target }) => { target.closest("dialog").close(); ask(what, fields()); });

export function runButtons(state, openDetail) {
  const stop = () => openDetail("Stop the run?",
    el("p", {}, "Once its last step is in a checkpoint, nodes go home and the coordinator ends. dtfm-coordinator serve goes on with it."),
    sure("Stop the run", "steer", () => ({ wish: "STOP" })));
  return [
    state === "paused" ? button("Continue", () => ask("steer", { wish: "CONTINUE" })) : button("Pause", () => ask("steer", { wish: "PAUSE" })),
    button("Plan now", () => ask("plan-now", {})),
    button("Invite a node", () => ask("invite", { role: "node", seconds: WEEK, uses: 1 })),
    button("Stop…", stop),
  ];
}

export function nodeButtons(node, isQuarantined) {
  if (isQuarantined) return el("p", { class: "direct" }, sure("Forgive", "forgive", () => ({ node })));
  const reason = el("input", { id: "reason", maxlength: 200 });
  return el("p", { class: "direct" }, el("label", { for: "reason" }, "Why"), reason, sure("Expel", "expel", () => ({ node, reason: reason.value })));
}
