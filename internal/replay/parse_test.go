package replay

import (
	"bytes"
	"compress/gzip"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// excerpt parses files of testdata as one trace.
func excerpt(t testing.TB, format string, names ...string) *Trace {
	t.Helper()
	var sources []Source
	for _, name := range names {
		b, err := os.ReadFile(filepath.Join("testdata", name))
		if err != nil {
			t.Fatal(err)
		}
		sources = append(sources, Source{name, bytes.NewReader(b)})
	}
	tr, err := Parse(format, sources...)
	if err != nil {
		t.Fatal(err)
	}
	return tr
}

// excerpts are all of testdata.
func excerpts(t testing.TB) map[string]*Trace {
	return map[string]*Trace{
		"mooncake": excerpt(t, "mooncake", "mooncake_part.jsonl.gz"),
		"kvct":     excerpt(t, "kvct", "kvct_0019.json.gz", "kvct_0277_part.json.gz"),
		"bailian":  excerpt(t, "bailian", "bailian_made.jsonl"),
		"tot":      excerpt(t, "tot", "tot_part.json.gz"),
	}
}

func TestParseCounts(t *testing.T) {
	want := map[string]struct{ requests, sessions, prompt, output int }{
		"mooncake": {90, 0, 1181194, 16187},
		"kvct":     {36, 5, 921223, 14789},
		"bailian":  {6, 3, 2646, 262},
		"tot":      {190, 0, 100295, 1733},
	}
	for name, tr := range excerpts(t) {
		got := struct{ requests, sessions, prompt, output int }{len(tr.Requests), len(tr.Sessions), 0, 0}
		for _, r := range tr.Requests {
			got.prompt += r.prompt
			got.output += r.output
			if length(r.Prompt) != r.prompt || length(r.Output) != r.output {
				t.Errorf("%s: a request of %d+%d tokens has segments of %d+%d", name, r.prompt, r.output, length(r.Prompt), length(r.Output))
			}
		}
		if got != want[name] {
			t.Errorf("%s: got %+v, want %+v", name, got, want[name])
		}
	}
}

// TestSubAgents: a sub-agent's clock starts at its end minus its duration, and agents of a conversation share the
// beginning that the ids say they share.
func TestSubAgents(t *testing.T) {
	tr := excerpt(t, "kvct", "kvct_0277_part.json.gz")
	starts := map[string]int64{}
	for _, r := range tr.Requests {
		name := tr.Sessions[r.Session].Name
		if _, seen := starts[name]; !seen {
			starts[name] = r.At
		}
	}
	want := map[string]int64{"trace_0277": 0, "trace_0277/agent_001": 79224 - 59750, "trace_0277/agent_002": 183906 - 164445, "trace_0277/agent_003": 211347 - 191873}
	for name, at := range want {
		if starts[name] != at {
			t.Errorf("%s starts at %d ms, want %d", name, starts[name], at)
		}
	}
}

// TestSharedBeginning: two conversations have their tools and system prompt in common, though their ids are their own,
// as far as both go, and no token more.
func TestSharedBeginning(t *testing.T) {
	tr := excerpt(t, "kvct", "kvct_0019.json.gz", "kvct_0277_part.json.gz")
	lines := map[string][]int32{}
	for _, r := range tr.Requests {
		if name := tr.Sessions[r.Session].Name; lines[name] == nil {
			lines[name] = appendTokens(nil, r.Prompt, 0, 1<<31-1)
		}
	}
	a, b := lines["trace_0019"], lines["trace_0277"]
	common := 0
	for common < min(len(a), len(b)) && a[common] == b[common] {
		common++
	}
	if want := min(12439+2760, 12166+2875); common != want {
		t.Errorf("%d tokens in common, want %d", common, want)
	}
}

// TestAnswersGoOn: where the next prompt goes on from a request, it holds the answer.
func TestAnswersGoOn(t *testing.T) {
	tr := excerpt(t, "bailian", "bailian_made.jsonl")
	r, next := tr.Requests[0], tr.Requests[2]
	line := appendTokens(appendTokens(nil, r.Prompt, 0, 1<<31-1), r.Output, 0, 1<<31-1)
	then := appendTokens(nil, next.Prompt, 0, 1<<31-1)
	for i, tok := range line {
		if then[i] != tok {
			t.Fatalf("token %d of %d differs in the next prompt", i, len(line))
		}
	}
	if tr.Requests[3].Session != r.Session || tr.Requests[1].Session == r.Session {
		t.Errorf("sessions %d %d %d: a chat's turns share one, other chats do not", r.Session, tr.Requests[3].Session, tr.Requests[1].Session)
	}
}

func TestParseErrors(t *testing.T) {
	for _, c := range []struct{ format, text, want string }{
		{"mooncake", `{"timestamp":0,"input_length":600,"output_length":1,"hash_ids":[1,2]}` + "\n" + `{"timestamp":0,"output_length":1,"hash_ids":[1]}`, "f: line 2: input_length: missing"},
		{"mooncake", `{"timestamp":0,"input_length":600,"output_length":1,"hash_ids":[1,2,3]}`, "f: line 1: hash_ids: 3 blocks of 512 tokens for 600 tokens"},
		{"mooncake", `{"timestamp":0,"input_length":0,"output_length":1,"hash_ids":[]}`, "f: line 1: input length: want 1 or more"},
		{"mooncake", `{"timestamp":0,"input_length":-5,"output_length":1}`, "f: line 1: input_length: -5, want 0 to 4194304"},
		{"mooncake", `{"timestamp":1e300,"input_length":5,"output_length":1}`, "f: line 1: timestamp: 1e+297 seconds"},
		{"mooncake", "", "the trace has no requests"},
		{"mooncake", "nonsense", "f: line 1: invalid character"},
		{"bailian", `{"chat_id":1,"timestamp":0,"input_length":5,"output_length":1}`, "f: line 1: parent_chat_id: missing"},
		{"bailian", `{"chat_id":1,"parent_chat_id":-1,"timestamp":0,"input_length":5,"output_length":1,"hash_ids":[1]}` + "\n\n" +
			`{"chat_id":1,"parent_chat_id":-1,"timestamp":0,"input_length":5,"output_length":1,"hash_ids":[1]}`, "f: line 3: chat_id: 1 for the second time"},
		{"kvct", `[]`, "f: conversation: want an object, not ["},
		{"kvct", `{"id":"a"}`, "f: byte 10: requests: missing"},
		{"kvct", `{"block_size":32}`, "block_size: 32, want 64"},
		{"kvct", `{"requests":[{"t":0,"type":"x"}]}`, `requests[0].type: "x", want n, s or subagent`},
		{"kvct", `{"requests":[{"t":0,"type":"n","in":64,"out":1,"hash_ids":[1]},{"t":0,"type":"n","out":1}]}`, "requests[1].in: missing"},
		{"kvct", `{"requests":[{"t":9,"type":"subagent","duration_ms":1,"requests":[{"type":"n"}]}]}`, "requests[0].requests[0].t: missing"},
		{"kvct", `{"requests":[{"t":9,"type":"subagent"}]}`, "requests[0].duration_ms: missing"},
		{"tot", `{}`, "f: want a list of puzzles, not {"},
		{"tot", `[{"steps":[{"x":"1 2","ys":["a\n"],"new_ys":["a\n"]}]}]`, "puzzle 0: steps[0].new_ys[0]: adds nothing to its parent"},
		{"cards", "", `format "cards": want one of [mooncake kvct bailian tot], or c32`},
	} {
		_, err := Parse(c.format, Source{"f", strings.NewReader(c.text)})
		if err == nil || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%s %.60s: got %v, want %s", c.format, c.text, err, c.want)
		}
	}
}

// TestParseBounds: a small file that unpacks to a long line ends with an error, not with the memory.
func TestParseBounds(t *testing.T) {
	var packed bytes.Buffer
	z, err := gzip.NewWriterLevel(&packed, gzip.BestSpeed)
	if err != nil {
		t.Fatal(err)
	}
	for range 17 {
		z.Write(make([]byte, 1<<20))
	}
	if err := z.Close(); err != nil {
		t.Fatal(err)
	}
	if _, err := Parse("mooncake", Source{"f", &packed}); err == nil || !strings.Contains(err.Error(), "token too long") {
		t.Errorf("got %v", err)
	}
	r := &bounded{strings.NewReader("12345"), 4}
	if n, err := r.Read(make([]byte, 9)); err == nil {
		t.Errorf("read %d of 5 bytes where 4 are allowed", n)
	}
}

// fuzz checks that whatever parses is in order and can be walked.
func fuzz(f *testing.F, format string) {
	g, err := GeometryOf("nano", "f32")
	if err != nil {
		f.Fatal(err)
	}
	f.Fuzz(func(t *testing.T, text []byte) {
		tr, err := Parse(format, Source{"f", bytes.NewReader(text)})
		if err != nil {
			return
		}
		tokens := 0
		for _, r := range tr.Requests {
			if r.Done < r.At || length(r.Prompt) != r.prompt || r.prompt < 1 || int(r.Session) >= len(tr.Sessions) {
				t.Fatalf("request %+v", r)
			}
			tokens += r.prompt + r.output
		}
		if tokens < 1<<16 {
			walk(t, tr, Options{Geometry: g, CheckEvery: 4})
			walk(t, tr, Options{Geometry: g, CheckEvery: 4, Budget: 8 << 20})
		}
	})
}

func FuzzMooncake(f *testing.F) {
	f.Add([]byte(`{"timestamp":0,"input_length":600,"output_length":9,"hash_ids":[1,2]}` + "\n" + `{"timestamp":5,"input_length":700,"output_length":9,"hash_ids":[1,3]}`))
	fuzz(f, "mooncake")
}

func FuzzBailian(f *testing.F) {
	b, err := os.ReadFile("testdata/bailian_made.jsonl")
	if err != nil {
		f.Fatal(err)
	}
	f.Add(b)
	fuzz(f, "bailian")
}

func FuzzKVCT(f *testing.F) {
	f.Add([]byte(`{"id":"a","block_size":64,"hash_id_scope":"local","tool_tokens":70,"system_tokens":9,"requests":[
		{"t":0,"type":"n","in":130,"out":20,"hash_ids":[1,2],"api_time":1.5},
		{"t":9,"type":"subagent","agent_id":"s","duration_ms":8000,"tool_tokens":60,"system_tokens":4,"requests":[{"t":0,"type":"s","in":64,"out":3,"hash_ids":[7]}]},
		{"t":10.5,"type":"n","in":200,"out":2,"hash_ids":[1,2,3]}]}`))
	fuzz(f, "kvct")
}

func FuzzToT(f *testing.F) {
	f.Add([]byte(`[{"steps":[{"x":"4 5","ys":[""],"new_ys":["a\n","b\n"]},{"x":"4 5","ys":["a\n"],"new_ys":["a\nc\n"]}]}]`))
	fuzz(f, "tot")
}
