// The first view: what went through, what was saved, and the last requests.

import { bars, lines, strip } from "./charts.js";
import { card, chip, empty, h, muted, paint, table } from "./dom.js";
import { ceiling, clock, count, duration, percent, share } from "./format.js";
import { systemCards } from "./system.js";

const ARROW = " \u2192 ";
const RECENT = 5; // slots that a rate is taken over
const LEAST = 20; // slots that a chart has, also right after a start
const OUTCOMES = {
  ok: ["answered", "good"],
  failed: ["failed", "bad"],
  refused: ["refused", "warn"],
  cancelled: ["left", ""],
};

/** The places of the view, to be filled again and again. */
export function overviewFrame(more) {
  const names = ["tiles", "charts", "policies", "requests", "system"];
  const places = Object.fromEntries(names.map((name) => [name, h("div", { class: name })]));
  const button = h("button", { type: "button", hidden: true }, "Show more requests");
  button.addEventListener("click", more);
  return {
    places,
    button,
    nodes: [
      h("h1", { class: "unseen" }, "Overview"),
      ...names.flatMap((name) => (name === "system" ? [button, places[name]] : places[name])),
    ],
  };
}

export function showOverview(places, data, list) {
  paint(places.tiles, [data.totals, data.slots.slice(-RECENT), data.window_s], () => tiles(data));
  paint(places.charts, [data.slots, data.slot_s], () => charts(data));
  paint(places.policies, data.policies, policies);
  paint(places.requests, [list, data.viewer], () => requests(list, data.viewer));
  paint(places.system, data.system, (system) => (system ? systemCards(system) : []));
}

/** How a request ended, as a chip. */
export const outcome = (request) => {
  const [word, kind] = OUTCOMES[request.outcome] ?? [request.outcome, ""];
  const status = request.status && request.outcome !== "ok" ? `${word} ${request.status}` : word;
  return chip(request.cache === "hit" ? "given again" : status, kind);
};

const tile = (title, value, more) =>
  h("div", { class: "tile" }, h("dt", {}, title), h("dd", {}, h("strong", {}, value), muted(more)));

function tiles({ totals, slots, slot_s }) {
  const saved = totals.pruned + totals.cached + totals.reused;
  const errors = totals.failed + totals.refused;
  const ttft = totals.ttft_ms;
  const recent = slots.slice(-RECENT).reduce((sum, slot) => sum + slot.ok + slot.errors + slot.cancelled, 0);
  const rate = (60 * recent) / (RECENT * slot_s);
  return h(
    "dl",
    {},
    tile(
      "Requests",
      count(totals.requests),
      `lately ${rate.toLocaleString("en", { maximumSignificantDigits: 2 })} per minute`,
    ),
    tile(
      "Errors",
      totals.requests ? percent(errors / totals.requests) : "\u2013",
      `${count(totals.failed)} failed, ${count(totals.refused)} refused, ${count(totals.cancelled)} left`,
    ),
    tile("Prompt tokens saved", count(saved), [
      percent(share(saved, totals.tokens_in + totals.retrieved)),
      ` of ${count(totals.tokens_in + totals.retrieved)}`,
    ]),
    tile(
      "Time saved",
      duration(totals.saved_ms - totals.overhead_ms),
      `${duration(totals.saved_ms)} predicted, ${duration(totals.overhead_ms)} spent`,
    ),
    tile(
      "First token, median",
      duration(ttft.p50),
      ttft.count ? `p95 ${duration(ttft.p95)}, p99 ${duration(ttft.p99)}` : "no streams yet",
    ),
    tile("Tokens written", count(totals.completion), answersAgain(totals)),
  );
}

const answersAgain = ({ hit, miss }) =>
  hit + miss ? `${percent(hit / (hit + miss))} of answers given again` : "in answers";

function charts({ slots: all, slot_s, started }) {
  const first = all.findIndex((slot) => slot.at + slot_s > started);
  const slots = all.slice(Math.max(0, Math.min(first, all.length - LEAST)));
  const perMinute = (value) => (60 * value) / slot_s;
  const name = (slot) => clock(slot.at, slot_s < 60);
  const axis = { from: name(slots[0]), to: "now" };
  const most = ceiling(Math.max(...slots.map((slot) => perMinute(slot.ok + slot.errors + slot.cancelled))));
  const slow = ceiling(Math.max(0, ...slots.map((slot) => slot.ttft_ms.p95 ?? 0)));
  const traffic = slots.map((slot) => ({
    title: `${name(slot)}: ${slot.ok} answered, ${slot.errors} errors, ${slot.cancelled} left`,
    values: [slot.ok, slot.errors, slot.cancelled].map(perMinute),
  }));
  const sum = (key) => slots.reduce((all, slot) => all + slot[key], 0);
  const said = `Requests per minute: ${sum("ok")} answered, ${sum("errors")} errors, ${sum("cancelled")} left since ${axis.from}`;
  const latest = slots.findLast((slot) => slot.ttft_ms.p50 !== null);
  const times = latest ? `, lately ${duration(latest.ttft_ms.p50)} median, ${duration(latest.ttft_ms.p95)} p95` : "";
  const titles = slots.map(
    (slot) => `${name(slot)}: p50 ${duration(slot.ttft_ms.p50)}, p95 ${duration(slot.ttft_ms.p95)}`,
  );
  const key = (kind, text) => h("span", { class: "key" }, h("i", { class: kind }), text);
  return [
    card(
      "Requests per minute",
      [key("good", "answered"), key("bad", "errors"), key("left", "left")],
      bars(said, traffic, ["good", "bad", "left"], most, { ...axis, top: count(most) }),
    ),
    card(
      "Time to first token",
      [key("p50", "median"), key("p95", "p95")],
      lines(
        `Time to first token${times}`,
        [
          { kind: "p95", values: slots.map((slot) => slot.ttft_ms.p95) },
          { kind: "p50", values: slots.map((slot) => slot.ttft_ms.p50) },
        ],
        slow,
        { ...axis, top: latest ? duration(slow) : "" },
        titles,
      ),
    ),
  ];
}

function policies(list) {
  if (!list.length) return card("By policy", null, empty("No requests in this period."));
  const columns = [
    { title: "Policy" },
    { title: "Requests", number: true },
    { title: "Errors", number: true },
    { title: "Prompt tokens", number: true },
    { title: "Pruned", number: true },
    { title: "Prefix cached", number: true },
    { title: "KV reused", number: true },
    { title: "Time saved", number: true },
    { title: "First token p50 / p95 / p99", number: true },
  ];
  const rows = list.map((one) => [
    one.policy ? h("b", {}, one.policy) : muted("refused before"),
    count(one.requests),
    one.failed + one.refused ? count(one.failed + one.refused) : "0",
    !one.policy
      ? "\u2013"
      : [count(one.tokens_in), ARROW, count(one.tokens_out), one.retrieved ? muted(` +${count(one.retrieved)}`) : null],
    part(one.pruned, one.tokens_in + one.retrieved),
    part(one.cached, one.tokens_out),
    part(one.reused, one.tokens_out),
    one.saved_ms || one.overhead_ms >= 0.5 * one.requests ? duration(one.saved_ms - one.overhead_ms) : "\u2013",
    one.ttft_ms.count ? [one.ttft_ms.p50, one.ttft_ms.p95, one.ttft_ms.p99].map(duration).join(" / ") : "\u2013",
  ]);
  return card(
    "By policy",
    "prefix hits are not in the time saved",
    h("div", { class: "scroll" }, table("By policy", columns, rows)),
  );
}

const part = (value, whole) => (value ? [count(value), muted(` ${percent(share(value, whole))}`)] : "0");

/** What became of a prompt's tokens, as a strip. */
export function tokenStrip(request) {
  const computed = request.tokens_out - request.cached - request.reused;
  const label = `${count(request.tokens_in)} prompt tokens, ${count(request.tokens_out)} sent`;
  return strip(label, [
    { kind: "cached", value: request.cached, title: `${count(request.cached)} from the prefix cache` },
    { kind: "reused", value: request.reused, title: `${count(request.reused)} from stored KV` },
    { kind: "kept", value: computed, title: `${count(computed)} computed` },
    { kind: "pruned", value: request.pruned, title: `${count(request.pruned)} pruned` },
  ]);
}

function requests(list, viewer) {
  if (!list.length) {
    return card(
      "Requests",
      null,
      empty("No requests yet. Point a client at ", h("code", {}, `${location.origin}/v1`), " and they appear here."),
    );
  }
  const columns = [
    { title: "Time" },
    { title: "Policy" },
    { title: "Model" },
    { title: "Prompt tokens", number: true },
    { title: "Of these" },
    { title: "First token", number: true },
    { title: "Total", number: true },
    { title: "Outcome" },
  ];
  const rows = list.map((one) => [
    h("a", { href: `#/requests/${one.id}`, "aria-label": `Request at ${clock(one.at)}` }, clock(one.at)),
    one.policy || muted("\u2013"),
    one.model ? h("span", { class: "name" }, one.model, one.key && muted(` ${one.key}`)) : muted(one.path),
    !one.tokens_in
      ? "\u2013"
      : one.tokens_in === one.tokens_out
        ? count(one.tokens_in)
        : [count(one.tokens_in), ARROW, count(one.tokens_out)],
    one.tokens_out ? tokenStrip(one) : "",
    duration(one.ttft_ms),
    duration(one.total_ms),
    outcome(one),
  ]);
  const whose = viewer.everybody ? "everybody\u2019s" : `of the key ${viewer.key}`;
  return card("Requests", whose, legend(), h("div", { class: "scroll" }, table("Requests", columns, rows)));
}

const legend = () =>
  h(
    "p",
    { class: "legend" },
    [
      ["cached", "prefix cached"],
      ["reused", "KV reused"],
      ["kept", "computed"],
      ["pruned", "pruned"],
    ].map(([kind, text]) => h("span", { class: "key" }, h("i", { class: kind }), text)),
  );
