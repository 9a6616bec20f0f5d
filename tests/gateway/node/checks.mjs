// OpenAI's client for Node against a gateway: node --test checks.mjs, with BASE_URL, MODEL and EMBEDDER in the
// environment. FORCED=1: the model calls a function only when it has to. SCRIPTED=1: it says what provider.py says.
import assert from "node:assert/strict";
import { test } from "node:test";
import OpenAI from "openai";
import { zodResponseFormat } from "openai/helpers/zod";
import { z } from "zod";

const { BASE_URL, MODEL, EMBEDDER, FORCED, SCRIPTED } = process.env;
const TEXT = "Hello from far away.";
const messages = [{ role: "user", content: "How is the weather in Oslo?" }];
const parameters = {
  type: "object",
  properties: { city: { type: "string", enum: ["Oslo", "Rome"] }, degrees: { type: "integer" } },
  required: ["city", "degrees"],
  additionalProperties: false,
};
const tools = [{ type: "function", function: { name: "report", description: "Report it.", parameters, strict: true } }];
const forced = { type: "function", function: { name: "report" } };
const choice = FORCED ? { tool_choice: forced } : {};
const Forecast = z.object({ city: z.enum(["Oslo", "Rome"]), degrees: z.number().int() });

/** A client that counts the requests that it sends. */
function counting(options = {}) {
  const sent = { requests: 0 };
  const counted = (...given) => (sent.requests++, fetch(...given));
  return [new OpenAI({ baseURL: BASE_URL, apiKey: "none", fetch: counted, ...options }), sent];
}
const [client] = counting({ maxRetries: 0 });

test("a chat, whole", async () => {
  const { data, response } = await client.chat.completions
    .create({ model: MODEL, messages, max_tokens: 4, seed: 1 })
    .withResponse();
  assert.equal(data.object, "chat.completion");
  assert.equal(data.choices[0].message.role, "assistant");
  assert.equal(typeof data.choices[0].message.content, "string");
  assert.ok(data.usage.total_tokens > 0);
  assert.ok(response.headers.get("x-request-id"));
  if (SCRIPTED) assert.equal(data.choices[0].message.content, TEXT);
});

test("a chat, streamed, with one usage frame at its end", async () => {
  const options = { stream: true, stream_options: { include_usage: true } };
  const chunks = [];
  for await (const chunk of await client.chat.completions.create({ model: MODEL, messages, max_tokens: 4, ...options }))
    chunks.push(chunk);
  assert.deepEqual(chunks.filter((one) => one.usage).map((one) => chunks.indexOf(one)), [chunks.length - 1]);
  assert.deepEqual(chunks.at(-1).choices, []);
  assert.equal(chunks.filter((one) => one.choices[0]?.finish_reason).length, 1);
  assert.equal(new Set(chunks.map((one) => one.id)).size, 1);
});

test("the stream helper", async () => {
  const stream = client.chat.completions.stream({ model: MODEL, messages, max_tokens: 4, seed: 1 });
  let seen = "";
  stream.on("content", (delta, snapshot) => {
    seen += delta;
    assert.equal(snapshot, seen);
  });
  const final = await stream.finalChatCompletion();
  assert.equal(final.choices[0].message.content, seen);
  assert.equal(await stream.finalContent(), seen);
  if (SCRIPTED) assert.equal(seen, TEXT);
});

test("parsed by a schema", async () => {
  const response_format = zodResponseFormat(Forecast, "forecast");
  const whole = await client.chat.completions.parse({ model: MODEL, messages, response_format, max_tokens: 200 });
  assert.equal(Forecast.safeParse(whole.choices[0].message.parsed).success, true);
  const stream = client.chat.completions.stream({ model: MODEL, messages, response_format, max_tokens: 200 });
  const final = await stream.finalChatCompletion();
  assert.equal(Forecast.safeParse(final.choices[0].message.parsed).success, true);
});

test("a tool call, whole and streamed, and its answer", async () => {
  const asked = { model: MODEL, messages, tools, max_tokens: 200, seed: 1, ...choice };
  const whole = (await client.chat.completions.create(asked)).choices[0];
  // OpenAI and vLLM say `stop` where a function was named.
  assert.ok((FORCED ? ["tool_calls", "stop"] : ["tool_calls"]).includes(whole.finish_reason));
  const [call] = whole.message.tool_calls;
  assert.equal(call.function.name, "report");
  assert.ok(["Oslo", "Rome"].includes(JSON.parse(call.function.arguments).city));
  const streamed = (await client.chat.completions.stream(asked).finalChatCompletion()).choices[0];
  assert.equal(streamed.finish_reason, whole.finish_reason);
  assert.equal(streamed.message.tool_calls[0].function.name, "report");
  const given = (one) => JSON.parse(one.function.arguments);
  assert.deepEqual(given(streamed.message.tool_calls[0]), given(call));
  const result = { role: "tool", tool_call_id: call.id, content: "Reported." };
  const last = { model: MODEL, messages: [...messages, whole.message, result], tools, max_tokens: 4 };
  assert.equal(typeof (await client.chat.completions.create(last)).choices[0].message.content, "string");
});

for (const stream of [false, true]) {
  test(`runTools, ${stream ? "streamed" : "whole"}`, async () => {
    const reported = [];
    const report = (given) => (reported.push(given), "Reported.");
    const runnable = { ...tools[0].function, function: report, parse: JSON.parse };
    const asked = { model: MODEL, messages, tools: [{ type: "function", function: runnable }], max_tokens: 200 };
    const runner = client.chat.completions.runTools({ ...asked, stream, ...choice });
    await runner.done();
    assert.equal(reported.length, 1);
    assert.ok(["Oslo", "Rome"].includes(reported[0].city));
    assert.equal(runner.messages.filter((one) => one.role === "tool").length, 1);
    if (!FORCED) assert.equal(await runner.finalContent(), TEXT);
  });
}

test("a raw prompt, whole and streamed", async () => {
  const asked = { model: MODEL, prompt: "Once upon a time", max_tokens: 4, seed: 1, temperature: 0 };
  const whole = await client.completions.create(asked);
  let text = "";
  for await (const chunk of await client.completions.create({ ...asked, stream: true })) text += chunk.choices[0].text;
  assert.equal(text, whole.choices[0].text);
});

test("embeddings of texts and ids, as numbers and as base64", async () => {
  const asked = { model: EMBEDDER, input: ["a boat", "a lake"] };
  const plain = await client.embeddings.create(asked); // base64 beneath, which the client decodes
  const numbers = await client.embeddings.create({ ...asked, encoding_format: "float" });
  const encoded = await client.embeddings.create({ ...asked, encoding_format: "base64" });
  assert.deepEqual(plain.data.map((one) => one.index), [0, 1]);
  assert.equal(plain.data[0].embedding.length, numbers.data[0].embedding.length);
  plain.data[1].embedding.forEach((value, at) => assert.ok(Math.abs(value - numbers.data[1].embedding[at]) < 1e-5));
  assert.equal(typeof encoded.data[0].embedding, "string");
  assert.equal((await client.embeddings.create({ model: EMBEDDER, input: [[1037, 4049], [2006]] })).data.length, 2);
});

test("responses, whole, streamed and continued", async () => {
  const asked = { model: MODEL, input: "How are you?", max_output_tokens: 16, temperature: 0 };
  const whole = await client.responses.create(asked);
  assert.ok(["completed", "incomplete"].includes(whole.status));
  assert.equal(typeof whole.output_text, "string");
  const events = [];
  for await (const event of await client.responses.create({ ...asked, stream: true })) events.push(event);
  assert.equal(events[0].type, "response.created");
  assert.ok(["response.completed", "response.incomplete"].includes(events.at(-1).type));
  assert.deepEqual(events.map((one) => one.sequence_number), events.map((_, at) => at));
  const text = events.filter((one) => one.type === "response.output_text.delta").map((one) => one.delta).join("");
  assert.equal(text, whole.output_text);
  const helped = await client.responses.stream({ ...asked, previous_response_id: whole.id }).finalResponse();
  assert.equal(helped.previous_response_id, whole.id);
  assert.equal((await client.responses.retrieve(whole.id)).id, whole.id);
  await client.responses.delete(whole.id);
  await assert.rejects(client.responses.retrieve(whole.id), OpenAI.NotFoundError);
});

test("responses call a function", async () => {
  const tool = { type: "function", name: "report", parameters, strict: true };
  const tool_choice = FORCED ? { tool_choice: { type: "function", name: "report" } } : {};
  const asked = { model: MODEL, input: "Report it.", tools: [tool], max_output_tokens: 200, ...tool_choice };
  const [call] = (await client.responses.create(asked)).output;
  assert.equal(call.type, "function_call");
  assert.ok(["Oslo", "Rome"].includes(JSON.parse(call.arguments).city));
});

test("models", async () => {
  const listed = [];
  for await (const model of client.models.list()) listed.push(model.id);
  assert.ok(listed.includes(MODEL));
  assert.equal((await client.models.retrieve(MODEL)).id, MODEL);
});

test("errors have their class, their code and their field, and are asked for once", async () => {
  const [retrying, sent] = counting({ maxRetries: 2 });
  await assert.rejects(retrying.chat.completions.create({ model: "nobody", messages }), (error) => {
    assert.ok(error instanceof OpenAI.NotFoundError);
    assert.equal(error.code, "model_not_found");
    assert.equal(error.param, "model");
    assert.ok(error.requestID);
    return true;
  });
  await assert.rejects(retrying.chat.completions.create({ model: MODEL, messages: [] }), OpenAI.BadRequestError);
  assert.equal(sent.requests, 2);
});

test("what the server calls hopeless is not tried again, though its status is", async () => {
  const [retrying, sent] = counting({ maxRetries: 2 });
  const body = { name: `twice-${MODEL}`.slice(0, 60) };
  await retrying.post("/collections", { body });
  await assert.rejects(retrying.post("/collections", { body }), OpenAI.ConflictError);
  assert.equal(sent.requests, 2);
  await retrying.delete(`/collections/${body.name}`);
});

test("an upstream that is not there is tried again by the client", async () => {
  const [retrying, sent] = counting({ maxRetries: 1 });
  const asked = { model: "dead", messages };
  await assert.rejects(retrying.chat.completions.create(asked), OpenAI.InternalServerError);
  await assert.rejects(retrying.chat.completions.create({ ...asked, stream: true }), OpenAI.InternalServerError);
  assert.equal(sent.requests, 4);
});

test("a stream that is aborted ends", { skip: SCRIPTED && "it is too short" }, async () => {
  const long = { model: MODEL, messages, max_tokens: 900, ignore_eos: true, stream: true };
  const stream = await client.chat.completions.create(long);
  let chunks = 0;
  for await (const _ of stream) if (++chunks === 3) stream.controller.abort();
  assert.equal(chunks, 3);
  const helper = client.chat.completions.stream(long);
  helper.once("content", () => helper.abort());
  await assert.rejects(helper.done(), OpenAI.APIUserAbortError);
});

test("a request that is aborted before it is answered", { skip: SCRIPTED && "it is too short" }, async () => {
  const leaving = new AbortController();
  const long = { model: MODEL, messages, max_tokens: 900, ignore_eos: true };
  const asked = client.chat.completions.create(long, { signal: leaving.signal });
  setImmediate(() => leaving.abort());
  await assert.rejects(asked, OpenAI.APIUserAbortError);
});
