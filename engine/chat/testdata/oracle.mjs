// The reference for the chat templates' tests.
//
//   node oracle.mjs NANO_TOKENIZER_CONFIG TEMPLATES_DIR   writes one JSON line for each template and conversation below
import fs from "node:fs";
import path from "node:path";
import { Template } from "@huggingface/jinja";

const [config, dir] = process.argv.slice(2);
const templates = { nano: JSON.parse(fs.readFileSync(config, "utf8")).chat_template };
for (const name of [
  "Qwen3-8B-Q8_0", "Qwen3.5-35B-A3B-Q8_0", "Qwen3.6-35B-A3B-UD-Q4_K_M", "Qwen3-VL-30B-A3B-Instruct-Q8_0", "GLM-5.2", "Kimi-K3", "gpt-oss-20b-Q8_0",
  "DeepSeek-V4-Flash", "NVIDIA-Nemotron-3-Super", "Llama-3.2-1B-Instruct-GGUF", "gemma-4-26B-A4B-it-UD-Q8_K_XL", "laguna",
]) templates[name] = fs.readFileSync(path.join(dir, name + ".jinja"), "utf8");

const tool = {
  type: "function",
  function: {
    name: "get_weather",
    description: "Current weather at a place: \"now\", <b>not</b> later.\n",
    parameters: {
      type: "object",
      properties: { place: { type: "string", description: "zürich 中文" }, days: { type: "integer", minimum: 1, default: 3 }, scale: { type: "number", default: 0.5 } },
      required: ["place"],
    },
  },
};
const call = (args) => ({ id: "call00001", type: "function", function: { name: "get_weather", arguments: args } });
const conversations = {
  plain: { messages: [{ role: "user", content: "Hi" }], add_generation_prompt: true },
  system: {
    messages: [{ role: "system", content: "Be short." }, { role: "user", content: "1 < 2 && \"x\" 'y' \\ é 中文" }, { role: "assistant", content: "Yes." }, { role: "user", content: "  why?\n" }],
    add_generation_prompt: true,
  },
  ended: { messages: [{ role: "user", content: "Hi" }, { role: "assistant", content: "Hello." }], add_generation_prompt: false },
  parts: { messages: [{ role: "user", content: [{ type: "text", text: "one " }, { type: "text", text: "two" }] }], add_generation_prompt: true },
  thinking: {
    messages: [{ role: "user", content: "2+2?" }, { role: "assistant", content: "4", reasoning_content: "Easy." }, { role: "user", content: "3+3?" }],
    add_generation_prompt: true, enable_thinking: false,
  },
  tools: {
    messages: [
      { role: "user", content: "Weather in Zürich?" },
      { role: "assistant", content: "", tool_calls: [call({ place: "Zürich", days: 2, list: [1, 2.5, null, true], nested: { b: 1, a: "<x>" } })] },
      { role: "tool", tool_call_id: "call00001", name: "get_weather", content: "{\"t\": 21}" },
    ],
    tools: [tool], add_generation_prompt: true,
  },
  parallel: {
    messages: [
      { role: "system", content: "Use tools." },
      { role: "user", content: "Two?" },
      { role: "assistant", content: "Looking.", tool_calls: [call({ place: "A" }), { ...call({ place: "B" }), id: "call00002" }] },
      { role: "tool", tool_call_id: "call00001", name: "get_weather", content: "a" },
      { role: "tool", tool_call_id: "call00002", name: "get_weather", content: "b" },
      { role: "assistant", content: "Done." },
      { role: "user", content: "Thanks" },
    ],
    tools: [tool, { ...tool, function: { ...tool.function, name: "other" } }], add_generation_prompt: false,
  },
};
const vars = { bos_token: "<s>", eos_token: "</s>", pad_token: "<pad>" };

// Templates that write the date get this one.
const day = new Date(2026, 10, 30, 12);
globalThis.Date = class extends Date {
  constructor() {
    super(day);
  }
};

for (const [conversation, input] of Object.entries(conversations)) console.log(JSON.stringify({ conversation, input }));
for (const [template, source] of Object.entries(templates)) {
  for (const [conversation, input] of Object.entries(conversations)) {
    const line = { template, conversation };
    try {
      line.text = new Template(source).render({ ...vars, ...structuredClone(input) });
    } catch (e) {
      line.error = String(e.message).slice(0, 200);
    }
    console.log(JSON.stringify(line));
  }
}
