// The reference for the tokenizer's tests.
//
//   node oracle.mjs goldens TOKENIZER_JSON   writes one JSON line for each text below and for each list of ids
//   node oracle.mjs serve   TOKENIZER_JSON   answers JSON lines: {"text"} -> {"ids"}, {"ids"} -> {"text"}
import fs from "node:fs";
import readline from "node:readline";
import { Tokenizer } from "@huggingface/tokenizers";

const [mode, path] = process.argv.slice(2);
const file = JSON.parse(fs.readFileSync(path, "utf8"));
const tokenizer = new Tokenizer(file, { clean_up_tokenization_spaces: false });
const size = Object.values(file.model.vocab).concat(file.added_tokens.map((a) => a.id)).reduce((a, b) => Math.max(a, b)) + 1;

const encode = (text) => tokenizer.encode(text, { add_special_tokens: false }).ids;
const decode = (ids) => tokenizer.decode(ids, { skip_special_tokens: false, clean_up_tokenization_spaces: false });

// A small generator with a fixed seed, so that the goldens can be made again.
let state = 20261130;
function random(n) {
  state = (Math.imul(state, 1664525) + 1013904223) >>> 0;
  return Math.floor((state / 2 ** 32) * n);
}
const pick = (list) => list[random(list.length)];

const fixed = [
  "a", " ", "  ", "\n", "\r\n", "\t", "\n\n\n", " \n ", "   x", "x   ", "\u00a0x", "x\u3000y",
  "package main\n\nimport (\n\t\"fmt\"\n\t\"os\"\n)\n\nfunc main() {\n\tfor i := 0; i < 10; i++ {\n\t\tfmt.Fprintf(os.Stderr, \"%d\\n\", i)\n\t}\n}\n",
  "if err != nil {\n\t\treturn nil, fmt.Errorf(\"open %s: %w\", path, err)\n\t}",
  "I'm sure they'll say it's what we'd've DONE, WE'RE NOT; 'tis don'T",
  "the year 2026, 1234567890, 3.14159, 0xDEADBEEF, ½ ² Ⅷ ٣٤",
  "Ünïcödé ñandú Straße ŒUVRE İstanbul ſ",
  "combining: e\u0301 a\u0308\u0304 \u0301 n\u0303\u0323 q\u0307\u0323 \u1100\u1161\u11a8 \uac00\u11a8",
  "中文字符，測試。日本語のテキスト、カタカナ。한국어 문장입니다.",
  "😀😃 👩‍👩‍👧‍👦 🏳️‍🌈 🇩🇪🇫🇷 👍🏽 ☕️ 1️⃣",
  "Ελληνικά Русский עברית العربية हिन्दी ไทย தமிழ்",
  Array.from({ length: 32 }, (_, i) => String.fromCharCode(i)).join("") + "\x7f\x80\x9f\xad",
  "a" + " ".repeat(300) + "b" + "\n".repeat(100) + "\t".repeat(50) + " ".repeat(77),
  "=".repeat(200) + "\r\n" + "-".repeat(99) + "/*".repeat(40),
  "x".repeat(500), "ab".repeat(200), "é".repeat(100), "\u0301".repeat(40), "a" + "\u0323\u0301".repeat(20),
  "<|user|>\nhello<|end|>\n<|assistant|>\nhi<|end|>", "<|end|><|end|>", " <|end|> ", "<|end", "<|user|end|>", "<<|end|>>",
  "https://example.org/a/b?c=d&e=%20#f", "snake_case camelCase PascalCase kebab-case SCREAMING_CASE",
  "// comment\r\n#include <stdio.h>\r\n\r\n  /* x */", "{\"a\":[1,2.5,null,true],\"b\":{\"c\":\"\\u00e9\"}}",
  "\u200b\u200d\u2060\u061c\u202e", "\u2028\u2029\u0085", "\u{10ffff}\u{f0000}\ue000\ufffd\ufffe",
];

// Runs of characters of a few kinds: the borders between them are where splitters differ.
const kinds = [
  "abcdefghijklmnopqrstuvwxyzABCXYZ", "0123456789", " ", " ", " ", "\n", "\r\n\t \v\f", "'\"`.,;:!?()[]{}<>|/\\-+=*&^%$#@~_",
  "éüßñøåçÀÎ", "中文日本語한국", "😀👍🏽❤️🇩🇪", "\u0301\u0308\u0323\u200d\u0e31", "ΑβгДהعहไ", "²½Ⅷ٣", "\u00a0\u2003\u3000",
].map((k) => Array.from(k));
const words = ["'s", "'LL", "'ve", "func", "return", "err", "the", "nil", "if ", "\t\t", "\n\n", "  ", "<|end|>", "<|user|>", "'"];

function randomText() {
  let text = "";
  for (let n = 1 + random(12); n > 0; n--) {
    if (random(4) === 0) {
      text += pick(words);
      continue;
    }
    const kind = pick(kinds);
    for (let m = 1 + random(random(4) === 0 ? 12 : 4); m > 0; m--) text += pick(kind);
  }
  return text;
}

if (mode === "goldens") {
  const texts = fixed.concat(Array.from({ length: 900 }, randomText));
  for (const text of texts) console.log(JSON.stringify({ text, ids: encode(text) }));
  for (let i = 0; i < 200; i++) {
    // Mostly tokens of few bytes: those break characters.
    const ids = Array.from({ length: 1 + random(16) }, () => (random(2) ? random(Math.min(size, 300)) : random(size)));
    console.log(JSON.stringify({ ids, decoded: decode(ids) }));
  }
} else if (mode === "serve") {
  for await (const line of readline.createInterface({ input: process.stdin })) {
    const q = JSON.parse(line);
    console.log(JSON.stringify(q.text !== undefined ? { ids: encode(q.text) } : { text: decode(q.ids) }));
  }
} else {
  console.error("usage: node oracle.mjs goldens|serve TOKENIZER_JSON");
  process.exit(2);
}
