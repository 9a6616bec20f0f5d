// The state of what all requests share: quality gate, caches, controller, servers.

import { interval, strip } from "./charts.js";
import { card, chip, empty, h, muted, table } from "./dom.js";
import { bytes, count, duration, percent, share } from "./format.js";

const ARROW = " \u2192 ";

export function systemCards(system) {
  const backends = system.backends;
  return [gate(system), h("div", { class: "columns" }, caches(system), controller(backends), servers(backends))];
}

const named = (what, where) => [what, muted(` \u00b7 ${where}`)];

function caches({ backends, answers, records }) {
  const row = (name, used, budget, entries, hits, looked) => [
    name,
    [
      h("span", { class: "whole" }, bytes(used), budget ? muted(` of ${bytes(budget)}`) : null),
      budget ? strip(`${percent(used / budget)} full`, [{ kind: "used", value: used }], Math.max(budget, used)) : null,
    ],
    count(entries),
    looked ? [percent(hits / looked), muted(` of ${count(looked)}`)] : "\u2013",
  ];
  const rows = backends.flatMap(({ name, engine, tiers }) => [
    engine && [
      named("Prefix cache", name),
      [
        `${percent(share(engine.pages_cached, engine.pages_total))} of the pool`,
        strip("held", [{ kind: "used", value: engine.pages_cached }], engine.pages_total),
      ],
      `${count(engine.pages_cached)} pages`,
      engine.queried_tokens
        ? [percent(engine.cached_tokens / engine.queried_tokens), muted(` of ${count(engine.queried_tokens)} tokens`)]
        : "\u2013",
    ],
    engine?.host_pages_total
      ? row(named("Prefixes in host memory", name), null, 0, engine.host_pages_cached, 0, 0)
      : null,
    engine?.disk_pages ? row(named("Prefixes on disk", name), engine.disk_bytes, 0, engine.disk_pages, 0, 0) : null,
    ...tiers.map((tier) =>
      row(
        named(`Chunk KV: ${tier.tier}`, name),
        tier.bytes,
        tier.budget,
        tier.entries,
        tier.hits,
        tier.hits + tier.misses,
      ),
    ),
  ]);
  rows.push(
    row("Answers", answers.bytes, answers.budget, answers.entries, answers.hits, answers.hits + answers.misses),
  );
  rows.push(
    row(
      named("Records", records.text ? "with text" : "without text"),
      records.bytes,
      records.budget,
      records.entries,
      0,
      0,
    ),
  );
  const columns = [
    { title: "Cache" },
    { title: "Holds" },
    { title: "Entries", number: true },
    { title: "Hits", number: true },
  ];
  return card("Caches", null, table("Caches", columns, rows.filter(Boolean)));
}

function gate({ backends, bounds }) {
  const rows = backends.flatMap((backend) => backend.gate.map((one) => [backend, one]));
  const strictest = bounds.length ? Math.min(...bounds.map((bound) => bound.max_kl)) : null;
  if (!rows.length) return card("Quality gate", null, empty("No blend has been compared with a full prefill yet."));
  const columns = [
    { title: "Model, collection" },
    { title: "State" },
    { title: "KL of the next token, 95% interval" },
    { title: "Same tokens", number: true },
    { title: "Checks", number: true },
  ];
  const body = rows.map(([backend, one]) => [
    [h("b", {}, backend.models[0] ?? backend.name), " ", muted(one.collection || "what clients send")],
    one.off
      ? chip("blending off", "bad")
      : one.least
        ? chip(`repairs \u2265 ${percent(one.least)}`, "warn")
        : chip("blends", "good"),
    one.kl
      ? [
          between(one.kl, nats),
          interval(
            `KL ${between(one.kl, nats)}, bound ${strictest}`,
            one.kl,
            strictest,
            Math.max(1.25 * (strictest ?? 0), one.kl.high ?? one.kl.mean, 1e-6),
          ),
        ]
      : muted("no sample"),
    one.agreement ? between(one.agreement, (value) => percent(Math.min(1, Math.max(0, value)))) : "\u2013",
    [count(one.checked), one.dropped ? muted(` +${count(one.dropped)} dropped`) : null],
  ]);
  return card(
    "Quality gate",
    strictest === null ? null : `bound ${strictest} nats`,
    table("Quality gate", columns, body),
  );
}

const nats = (value) => Math.max(0, value).toLocaleString("en", { maximumSignificantDigits: 2 });
const between = ({ mean, low, high }, format) =>
  low === null || high === null ? format(mean) : `${format(mean)} (${format(low)}\u2013${format(high)})`;

function controller(backends) {
  const names = { untouched: "too short to look", full: "full prefill", reuse: "KV as stored", blend: "KV blended in" };
  const several = backends.filter((backend) => backend.controller).length > 1;
  const rows = backends.flatMap(({ name, controller: ways }) => {
    const all = (ways ?? []).reduce((sum, way) => sum + way.taken, 0);
    return all
      ? ways.map((way) => [
          [names[way.way], several ? muted(` \u00b7 ${name}`) : null],
          [count(way.taken), strip(percent(way.taken / all), [{ kind: "used", value: way.taken }], all)],
          way.real_s ? [duration(1000 * way.predicted_s), ARROW, duration(1000 * way.real_s)] : "\u2013",
          way.real_s ? percent(way.error) : "\u2013",
        ])
      : [];
  });
  const columns = [
    { title: "Way" },
    { title: "Taken" },
    { title: "Predicted \u2192 real", number: true },
    { title: "Typically off by", number: true },
  ];
  return card(
    "Controller",
    "which way prompts with stored KV went",
    rows.length ? table("Controller", columns, rows) : empty("No prompt with stored KV yet."),
  );
}

function servers(backends) {
  const state = (server) =>
    server.open ? chip("breaker open", "bad") : server.available ? chip("available", "good") : chip("resting", "warn");
  const rows = backends.flatMap(({ name, servers: list, not_ready: reason, healthy }) =>
    list.length
      ? list.map((server) => [server.host, name, state(server), count(server.requests), count(server.failures)])
      : [
          [
            "this process",
            name,
            reason ? chip(reason, healthy ? "warn" : "bad") : chip("ready", "good"),
            "\u2013",
            "\u2013",
          ],
        ],
  );
  const columns = [
    { title: "Server" },
    { title: "Backend" },
    { title: "State" },
    { title: "Asked", number: true },
    { title: "Failed", number: true },
  ];
  return card("Servers and circuit breakers", null, table("Servers", columns, rows));
}
