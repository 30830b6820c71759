import { defineConfig } from "vitest/config";

export default defineConfig({
  test: {
    fileParallelism: false, // one server and one browser at a time: two cores
    testTimeout: 60_000,
    hookTimeout: 120_000,
    expect: { poll: { timeout: 30_000 } }, // a second, its default, is little on a busy machine
  },
});
