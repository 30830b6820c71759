package checkpoint

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"syscall"
	"testing"
)

// sample is a layout of matrices in every written form and a vector, with the weights by name.
func sample(t *testing.T) (Layout, map[string]Weight) {
	t.Helper()
	weights := map[string]Weight{}
	l := Layout{Files: map[string][]byte{"config.json": []byte("{}\n"), "tokenizer.json": []byte("[]")}}
	for name, m := range matrices() {
		four, err := EncodeNVFP4("four "+name, m.n, m.k, m.v)
		if err != nil {
			t.Fatal(err)
		}
		eight, err := EncodeFP8Block("eight "+name, m.n, m.k, m.v)
		if err != nil {
			t.Fatal(err)
		}
		half := Weight{Name: "half " + name, Kind: KindBF16, N: m.n, K: m.k}
		for _, x := range m.v {
			half.Data = append(half.Data, byte(ToBF16(x)), byte(ToBF16(x)>>8))
		}
		for _, w := range []Weight{four, eight, half} {
			weights[w.Name] = w
			l.Groups = append(l.Groups, TensorGroup{StoredAs(w.Name, w.Kind, w.N, w.K), func() ([][]byte, error) { return w.Stored(), nil }})
		}
	}
	l.Groups = append(l.Groups, TensorGroup{[]TensorInfo{{"norm.weight", F32, []int{3}}}, func() ([][]byte, error) { return [][]byte{{0, 0, 128, 63, 0, 0, 0, 64, 0, 0, 64, 64}}, nil }})
	return l, weights
}

// TestWriteReadBack: exactly what was encoded is read, from one file and from shards of every size.
func TestWriteReadBack(t *testing.T) {
	l, weights := sample(t)
	total := int64(0)
	for _, g := range l.Groups {
		total += g.bytes()
	}
	for _, shard := range []int64{0, 1, 20_000, total - 1, total} {
		t.Run(fmt.Sprint(shard), func(t *testing.T) {
			dir := filepath.Join(t.TempDir(), "a", "model")
			l.ShardBytes = shard
			var done, all int64
			l.Progress = func(d, a int64) { done, all = d, a }
			if err := Write(t.Context(), dir, l); err != nil {
				t.Fatal(err)
			}
			if done != total || all != total {
				t.Errorf("progress ended at %d of %d, want %d", done, all, total)
			}
			_, indexErr := os.Stat(filepath.Join(dir, "model.safetensors.index.json"))
			if one := shard == 0 || shard >= total; one != errors.Is(indexErr, fs.ErrNotExist) {
				t.Errorf("index: %v", indexErr)
			}
			c, err := Open(dir)
			if err != nil {
				t.Fatal(err)
			}
			defer c.Close()
			for name, want := range weights {
				got, err := c.Weight(name, want.N, want.K)
				if err != nil {
					t.Fatal(err)
				}
				if got.Kind != want.Kind || !bytes.Equal(got.Data, want.Data) || !bytes.Equal(got.Scale8, want.Scale8) || fmt.Sprint(got.Scale) != fmt.Sprint(want.Scale) {
					t.Errorf("%s is not what was encoded", name)
				}
			}
			if v, err := c.Vector("norm.weight", 3); err != nil || v[0] != 1 || v[1] != 2 || v[2] != 3 {
				t.Error("norm:", v, err)
			}
			for name, want := range l.Files {
				if got, err := os.ReadFile(filepath.Join(dir, name)); err != nil || !bytes.Equal(got, want) {
					t.Errorf("%s: %q, %v", name, got, err)
				}
			}
		})
	}
}

// TestWriteAligned: tools that view a file's bytes in place need every tensor at a multiple of its element's size.
func TestWriteAligned(t *testing.T) {
	l, _ := sample(t)
	dir := filepath.Join(t.TempDir(), "model")
	if err := Write(t.Context(), dir, l); err != nil {
		t.Fatal(err)
	}
	b, err := os.ReadFile(filepath.Join(dir, "model.safetensors"))
	if err != nil {
		t.Fatal(err)
	}
	entries, data, err := parseHeader(b, int64(len(b)))
	if err != nil {
		t.Fatal(err)
	}
	for _, e := range entries {
		if (data+e.begin)%int64(e.dtype.Size()) != 0 {
			t.Errorf("%s (%s) starts at byte %d", e.name, e.dtype, data+e.begin)
		}
	}
}

// TestWriteFaults fails the i-th step that touches the disk for i = 0, 1, ... until a write succeeds. Nothing may be
// left under the final name before that, nor beside it.
func TestWriteFaults(t *testing.T) {
	l, _ := sample(t)
	l.ShardBytes = 20_000
	dir := filepath.Join(t.TempDir(), "out", "model")
	for i := 0; ; i++ {
		n, failed := 0, ""
		w := writer{ctx: t.Context(), l: l, fault: func(step string) error {
			if n++; n == i+1 {
				failed = step
				return syscall.ENOSPC
			}
			return nil
		}}
		err := w.write(dir)
		if failed == "" {
			if err != nil {
				t.Fatal(err)
			}
			if i < 20 {
				t.Fatalf("only %d steps", i)
			}
			break
		}
		if !errors.Is(err, syscall.ENOSPC) {
			t.Fatalf("step %d (%s) failed, error %v", i, failed, err)
		}
		left, _ := os.ReadDir(filepath.Dir(dir))
		if n == i+1 && failed == "sync folder" && len(left) == 1 && left[0].Name() == "model" {
			// The rename is done, its durability is not known: whole, and said.
			if c, err := Open(dir); err != nil {
				t.Fatal(err)
			} else {
				c.Close()
			}
			if err := os.RemoveAll(dir); err != nil {
				t.Fatal(err)
			}
			continue
		}
		if len(left) != 0 {
			t.Fatalf("step %d (%s) failed and left %v", i, failed, left)
		}
	}
	c, err := Open(dir)
	if err != nil {
		t.Fatal(err)
	}
	c.Close()
}

func TestWriteRefuses(t *testing.T) {
	l, _ := sample(t)
	dir := filepath.Join(t.TempDir(), "model")
	for name, spoil := range map[string]func(*Layout){
		"a failing maker": func(l *Layout) {
			l.Groups[3].Make = func() ([][]byte, error) { return nil, errors.New("no") }
		},
		"short bytes": func(l *Layout) {
			l.Groups[3].Make = func() ([][]byte, error) { return [][]byte{{1}, {2}, {3}}[:len(l.Groups[3].Tensors)], nil }
		},
		"a tensor twice":   func(l *Layout) { l.Groups = append(l.Groups, l.Groups[0]) },
		"a file elsewhere": func(l *Layout) { l.Files = map[string][]byte{"../x": nil} },
		"nothing":          func(l *Layout) { l.Groups = nil },
	} {
		bad := l
		bad.Groups = append([]TensorGroup{}, l.Groups...)
		spoil(&bad)
		if err := Write(t.Context(), dir, bad); err == nil {
			t.Errorf("%s: written", name)
		}
		if left, _ := os.ReadDir(filepath.Dir(dir)); len(left) != 0 {
			t.Errorf("%s: left %v", name, left)
		}
	}
	ctx, cancel := context.WithCancel(t.Context())
	l.Progress = func(done, _ int64) { cancel() }
	if err := Write(ctx, dir, l); !errors.Is(err, context.Canceled) {
		t.Error("cancelled:", err)
	}
	l.Progress = nil
	if err := Write(t.Context(), dir, l); err != nil {
		t.Fatal(err)
	}
	if err := Write(t.Context(), dir, l); !errors.Is(err, fs.ErrExist) {
		t.Error("a folder that exists:", err)
	}
}
