// One request: what became of its prompt, segment by segment, with its plan, times, headers and usage.

import { places, strip } from "./charts.js";
import { card, empty, h, muted, table } from "./dom.js";
import { count, duration, moment, percent, share, visible } from "./format.js";
import { outcome } from "./overview.js";
import { segments } from "./segments.js";

const ARROW = " \u2192 ";
const PREFILLS = new Set(["full", "reuse", "blend"]);

export function requestView(one) {
  return [
    h("p", {}, h("a", { href: "#/" }, "\u2190 All requests")),
    h("h1", { tabindex: "-1" }, "Request ", h("code", {}, one.request_id)),
    h("p", { class: "facts" }, outcome(one), " ", facts(one)),
    one.error ? h("p", { class: "problem" }, errorText(one)) : null,
    h("div", { class: "pair" }, times(one), tokens(one)),
    segments(one),
    steps(one),
    shadow(one.report.shadow),
    h(
      "div",
      { class: "pair" },
      pairs("Response headers", one.headers),
      pairs("Usage as it was billed", flat(one.usage)),
    ),
  ];
}

function facts(one) {
  const { policy, backend, reason } = one.report;
  const found = [
    moment(one.at),
    one.path,
    one.model,
    policy && `policy ${policy}${reason ? ` (${reason})` : ""}`,
    backend && `backend ${backend}`,
    one.stream ? "streamed" : "whole answer",
    one.key && `key ${one.key}`,
    one.report.rollout && `rollout ${one.report.rollout}, group ${one.report.group}`,
  ];
  return found.filter(Boolean).map((fact) => h("span", {}, visible(fact)));
}

const errorText = ({ error, status }) => [
  "Ended with ",
  h("b", {}, String(status)),
  " ",
  h("code", {}, visible([error.code ?? error.type, error.param && `param ${error.param}`].filter(Boolean).join(", "))),
];

function times(one) {
  const overhead = one.report.overhead_ms;
  const first = one.ttft_ms === null ? null : Math.max(0, one.ttft_ms - overhead);
  const rest = Math.max(0, one.total_ms - overhead - (first ?? 0));
  const parts = [
    { kind: "overhead", value: overhead, title: "optimizing" },
    { kind: "waiting", value: first ?? 0, title: "to the first token" },
    { kind: "writing", value: rest, title: first === null ? "answering" : "writing" },
  ].filter((part) => part.value > 0);
  const plan = one.plan_ms;
  return card(
    "Time",
    duration(one.total_ms),
    strip(parts.map((part) => `${part.title} ${duration(part.value)}`).join(", "), parts),
    h(
      "p",
      { class: "legend" },
      parts.map((part) =>
        h("span", { class: "key" }, h("i", { class: part.kind }), `${part.title} ${duration(part.value)}`),
      ),
    ),
    plan &&
      h(
        "p",
        {},
        "The plan expected ",
        h("b", {}, duration(plan.planned)),
        " until the first token, and ",
        h("b", {}, duration(plan.untouched)),
        " for the prompt as it came.",
      ),
  );
}

function tokens(one) {
  const report = one.report;
  const whole = report.tokens_out;
  const computed = Math.max(0, whole - report.cached - report.reused);
  const spans = report.kv_spans.map((span) => ({
    kind: "reused",
    start: span.start,
    size: span.tokens,
    title: `${count(span.tokens)} tokens from ${span.tier}`,
  }));
  const found = [
    { kind: "kept", start: 0, size: whole },
    { kind: "cached", start: 0, size: report.cached, title: `${count(report.cached)} prefix cached` },
    ...spans,
  ];
  const label = `${count(report.cached)} tokens prefix cached, ${count(report.reused)} reused, ${count(computed)} computed`;
  const flow =
    report.retrieved || report.pruned
      ? [
          count(report.tokens_in),
          report.retrieved ? ` + ${count(report.retrieved)} retrieved` : "",
          report.pruned ? ` \u2212 ${count(report.pruned)} pruned` : "",
          ARROW,
        ]
      : "";
  const tiers = Object.entries(report.tiers).map(([tier, size]) => `${count(size)} from ${tier}`);
  return card(
    "Prompt tokens",
    [flow, count(whole), " sent"],
    whole ? places(label, found, whole) : empty("Nothing was sent."),
    h(
      "p",
      { class: "legend" },
      [
        ["cached", "prefix cached", report.cached],
        ["reused", "KV reused", report.reused],
        ["kept", "computed", computed],
      ].map(([kind, text, value]) =>
        h(
          "span",
          { class: "key" },
          h("i", { class: kind }),
          `${text} ${count(value)} (${percent(share(value, whole))})`,
        ),
      ),
    ),
    tiers.length
      ? h(
          "p",
          { class: "muted" },
          `Stored KV: ${tiers.join(", ")}${report.recomputed ? `, ${count(report.recomputed)} repaired` : ""}.`,
        )
      : null,
  );
}

function steps(one) {
  const list = one.report.steps;
  if (!list.length) return card("Plan", null, empty("Nothing was to be done."));
  const columns = [
    { title: "Step" },
    { title: "Tokens", number: true },
    { title: "Predicted", number: true },
    { title: "Took", number: true },
    { title: "Saves", number: true },
    { title: "Note" },
  ];
  const rows = list.map((step) => [
    h("b", {}, visible(step.name)),
    step.tokens_before === step.tokens_after
      ? count(step.tokens_before)
      : [count(step.tokens_before), ARROW, count(step.tokens_after)],
    duration(step.predicted_ms),
    took(step, one),
    duration(step.saved_ms),
    visible(step.note),
  ]);
  return card("Plan, as it was carried out", "saved times are predictions", table("Plan", columns, rows));
}

/** What another policy would have done, where its route has a shadow. */
function shadow(found) {
  if (!found) return null;
  const ended = found.state === "done" || found.state === "failed";
  const done = [count(found.tokens_in), ARROW, count(found.tokens_out), ` tokens in ${duration(found.ms)}`];
  return card(
    "Shadow",
    "nothing of it was sent",
    h(
      "p",
      {},
      "The policy ",
      h("b", {}, found.policy),
      ended
        ? [
            " would have made ",
            done,
            found.state === "failed" ? ", with steps that failed: " : ".",
            visible(Object.keys(found.failed).join(", ")),
          ]
        : `: ${found.state}.`,
    ),
  );
}

/** What is predicted for stored KV is the prefill with it, not the lookup that the step itself is. */
function took(step, one) {
  if (!PREFILLS.has(step.name) || step.predicted_ms === null) return duration(step.ms);
  const real = one.ttft_ms === null ? "\u2013" : duration(one.ttft_ms - one.report.overhead_ms);
  return [real, muted(` lookup ${duration(step.ms)}`)];
}

const flat = (value, before = "") =>
  Object.entries(value ?? {}).flatMap(([name, one]) =>
    one !== null && typeof one === "object" ? flat(one, `${before}${name}.`) : [[before + name, one]],
  );

function pairs(title, values) {
  const entries = Array.isArray(values) ? values : Object.entries(values);
  if (!entries.length) return card(title, null, empty("None."));
  return card(
    title,
    null,
    h(
      "dl",
      { class: "pairs" },
      entries.map(([name, value]) => [
        h("dt", {}, visible(name)),
        h("dd", {}, typeof value === "number" ? count(value) : visible(String(value))),
      ]),
    ),
  );
}
