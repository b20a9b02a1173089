// Tests of the page's modules that need no browser: node --test crates/ridge-serve/tests/page.test.mjs

import assert from "node:assert/strict";
import { test } from "node:test";

import { bulk, ticks } from "../page/chart.js";
import { inline, parse } from "../page/markdown.js";
import { fresh, Store, titleOf } from "../page/store.js";
import { withinContext } from "../page/stream.js";

test("a request asks for as many tokens as the context has room for", async (t) => {
  const asked = [];
  const answer = (ok, count) =>
    t.mock.method(globalThis, "fetch", async (url, { body, headers }) => {
      asked.push([url, JSON.parse(body), headers]);
      return { ok, json: async () => ({ count, max_model_len: 128 }) };
    });
  const options = { headers: { Authorization: "Bearer x" } };
  const messages = [{ role: "user", content: "a" }];
  answer(true, 100);
  assert.deepEqual(await withinContext({ messages, max_tokens: 256 }, options), { messages, max_tokens: 28 });
  assert.deepEqual(asked, [["/tokenize", { messages }, options.headers]]);
  assert.deepEqual(await withinContext({ prompt: "a", max_tokens: 20 }, options), { prompt: "a", max_tokens: 20 });
  // Nothing to look up, and what the server is to refuse.
  assert.deepEqual(await withinContext({ prompt: "a" }, options), { prompt: "a" });
  assert.equal(asked.length, 2);
  answer(true, 128);
  assert.equal((await withinContext({ prompt: "a", max_tokens: 20 }, options)).max_tokens, 20);
  answer(false, 0);
  assert.equal((await withinContext({ prompt: "a", max_tokens: 200 }, options)).max_tokens, 200);
});

test("inline marks", () => {
  for (const [text, pieces] of [
    ["plain a_b_c 2 * 3 * 4", ["plain a_b_c 2 * 3 * 4"]],
    ["**bold** and *em*", [{ type: "strong", inline: ["bold"] }, " and ", { type: "em", inline: ["em"] }]],
    ["**a *b* c**", [{ type: "strong", inline: ["a ", { type: "em", inline: ["b"] }, " c"] }]],
    ["`a*b*` ``x`y``", [{ type: "code", text: "a*b*" }, " ", { type: "code", text: "x`y" }]],
    ["**not closed", ["**not closed"]],
    ["\\*kept\\*", ["*kept*"]],
    ["[x](y(z)) [not] (this)", [{ type: "link", url: "y(z)", inline: ["x"] }, " [not] (this)"]],
    ["~~gone~~", [{ type: "del", inline: ["gone"] }]],
    ["<b>&amp;", ["<b>&amp;"]],
  ]) {
    assert.deepEqual(inline(text), pieces, text);
  }
});

test("blocks", () => {
  const types = (text) => parse(text).map((block) => block.type);
  assert.deepEqual(types("# a\n\nb\nc\n\n---\n> d\n\n- e\n- f\n\n1. g"), ["heading", "paragraph", "rule", "quote", "list", "list"]);
  // A fence that is not closed yet is code to the end.
  assert.deepEqual(parse("a\n```rust\nfn f() {\n"), [
    { type: "paragraph", inline: ["a"] },
    { type: "code", language: "rust", text: "fn f() {\n" },
  ]);
  const [list] = parse("3. a\n   - b\n   - c\n4. d");
  assert.deepEqual([list.ordered, list.start, list.items.length, list.items[0][1].type], [true, 3, 2, "list"]);
  assert.equal(parse("| a | b |\n|---|:-:|\n| 1 | 2 |\nend")[0].rows.length, 2);
  assert.deepEqual(types("a | b\nno table"), ["paragraph"]);
});

test("whatever comes is parsed in time that grows with it", () => {
  for (const text of ["*".repeat(5000), "[".repeat(5000), "> ".repeat(2000), "- ".repeat(2000), "`".repeat(5001), "_a ".repeat(3000), "|-".repeat(3000)]) {
    const began = performance.now();
    parse(text);
    assert.ok(performance.now() - began < 2000, text.slice(0, 10));
  }
});

test("an outlier does not flatten a chart", () => {
  const usual = Array.from({ length: 50 }, (_, i) => 1 + (i % 5));
  assert.ok(bulk([...usual, 400]) < 10);
  assert.equal(bulk(usual), 5);
  assert.equal(bulk([1, 400]), 400);
  assert.deepEqual(ticks(3), [0, 1, 2, 3]);
});

test("conversations are kept, and make room", () => {
  const kept = new Map();
  const storage = {
    getItem: (key) => kept.get(key) ?? null,
    setItem: (key, value) => {
      if (value.length > 4000) throw new Error("QuotaExceededError");
      kept.set(key, value);
    },
  };
  const store = new Store(storage);
  const all = Array.from({ length: 10 }, (_, i) => ({ ...fresh(), title: `t${i}`, messages: [{ role: "user", content: "x".repeat(500) }] }));
  for (const one of all) assert.ok(store.keep(one));
  assert.equal(store.all()[0].title, "t9");
  assert.ok(store.all().length < 10 && store.all().length > 3);
  store.remove(all[9].id);
  assert.equal(store.all()[0].title, "t8");
  kept.set("ridge-conversations", "{");
  assert.deepEqual(store.all(), []);
  assert.equal(titleOf("  first  line\nsecond"), "first line");
});
