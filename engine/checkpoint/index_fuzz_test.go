package checkpoint

import (
	"os"
	"path/filepath"
	"testing"
)

// FuzzIndex: an index opens what it names inside of its folder, or is refused;
// nothing else is ever opened.
func FuzzIndex(f *testing.F) {
	dir := f.TempDir()
	file(f, filepath.Join(dir, "x"), []spec{{"a", F32, []int{2}, f32(1, 2)}}, nil)
	file(f, filepath.Join(filepath.Dir(dir), "outside"), []spec{{"a", F32, []int{2}, f32(1, 2)}}, nil)
	for _, s := range []string{
		`{"weight_map":{"a":"x"}}`, `{"weight_map":{"a":"../outside"}}`, `{"weight_map":{"a":"/etc/passwd"}}`, `{"weight_map":{"a":"."}}`, `{"weight_map":{"a":"x","b":"x"}}`, `{"weight_map":{}}`, `{"weight_map":{"a":"x\u0000"}}`, `[]`, ``,
	} {
		f.Add([]byte(s))
	}
	f.Fuzz(func(t *testing.T, text []byte) {
		if err := os.WriteFile(filepath.Join(dir, "model.safetensors.index.json"), text, 0o600); err != nil {
			t.Fatal(err)
		}
		c, err := Open(dir)
		if err != nil {
			return
		}
		defer c.Close()
		if names := c.Names(); len(names) != 1 || names[0] != "a" {
			t.Fatalf("%s opens %q", text, names)
		}
	})
}
