package main

import (
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"

	"rocket/engine"
	"rocket/engine/chat"
	"rocket/engine/model"
	"rocket/engine/tokenizer"
	"rocket/kernels"
	"rocket/models/nano"
)

// nanoName is the model inside the binary.
const nanoName = "nano"

// byteSize is a number of bytes: 1073741824, 512MiB, 2GiB.
type byteSize int64

// UnmarshalText makes byteSize a flag.
func (b *byteSize) UnmarshalText(text []byte) error {
	s := strings.TrimSpace(string(text))
	units := []struct {
		suffix string
		scale  int64
	}{{"KiB", 1 << 10}, {"MiB", 1 << 20}, {"GiB", 1 << 30}, {"TiB", 1 << 40}, {"B", 1}}
	scale := int64(1)
	for _, u := range units {
		if strings.HasSuffix(s, u.suffix) {
			s, scale = strings.TrimSpace(strings.TrimSuffix(s, u.suffix)), u.scale
			break
		}
	}
	n, err := strconv.ParseInt(s, 10, 64)
	if err != nil || n < 0 || n > (1<<62)/scale {
		return fmt.Errorf("want a size such as 512MiB, not %q", text)
	}
	*b = byteSize(n * scale)
	return nil
}

// engineFlags say what runs and in how much memory.
type engineFlags struct {
	Model         string   `help:"Folder of a model (config.json, safetensors, tokenizer.json), or nano, which is built in." default:"nano" env:"ROCKET_MODEL" placeholder:"DIR"`
	Class         string   `help:"Numeric class: bf16, or f32 for exactness against references." enum:"bf16,f32" default:"bf16" env:"ROCKET_CLASS"`
	Threads       int      `help:"Threads of the kernels; 0: one per core." default:"0" env:"ROCKET_THREADS"`
	PageBytes     byteSize `help:"Memory for pages of caches." default:"1GiB" env:"ROCKET_PAGE_BYTES" placeholder:"SIZE"`
	SnapshotBytes byteSize `help:"Memory for recurrent states." default:"512MiB" env:"ROCKET_SNAPSHOT_BYTES" placeholder:"SIZE"`
	HostBytes     byteSize `help:"Host memory for what is moved off the device." default:"2GiB" env:"ROCKET_HOST_BYTES" placeholder:"SIZE"`
}

// loaded is an engine and what it was made from.
type loaded struct {
	device   *kernels.Device
	model    *model.Model
	tok      *tokenizer.Tokenizer
	template *chat.Template // nil: the model has none
	engine   *engine.Engine
	name     string
}

// close gives everything back, in order.
func (l *loaded) close() {
	if l.engine != nil {
		l.engine.Close()
	}
	if l.model != nil {
		l.model.Close()
	}
	if l.device != nil {
		l.device.Close()
	}
}

// numericClass is what a --class flag names.
func numericClass(flag string) kernels.Class {
	if flag == "f32" {
		return kernels.ClassF32
	}
	return kernels.ClassBF16
}

// load loads the model and starts the engine; change sets what the flags do not.
func (f engineFlags) load(c *console, log *slog.Logger, change ...func(*engine.Options)) (*loaded, error) {
	if f.Threads < 0 {
		return nil, usage("--threads: want 0 or more, not %d", f.Threads)
	}
	if f.PageBytes == 0 || f.SnapshotBytes == 0 {
		return nil, usage("--page-bytes, --snapshot-bytes: want more than 0")
	}
	l := &loaded{}
	if err := f.loadInto(c, log, l, change); err != nil {
		l.close()
		return nil, err
	}
	return l, nil
}

func (f engineFlags) loadInto(c *console, log *slog.Logger, l *loaded, change []func(*engine.Options)) (err error) {
	dir, name, err := modelDir(f.Model)
	if err != nil {
		return err
	}
	l.name = name
	if l.tok, err = tokenizer.Load(filepath.Join(dir, "tokenizer.json")); err != nil {
		return err
	}
	if l.template, err = chat.Load(dir, l.tok); errors.Is(err, chat.ErrNoTemplate) {
		log.Warn("the model has no chat template: messages are refused, raw input works", "model", name)
	} else if err != nil {
		return err
	}
	if l.device, err = kernels.Open("auto", f.Threads); err != nil {
		return fmt.Errorf("open the device: %w", err)
	}
	update, done := c.progress("loading " + name)
	l.model, err = model.Load(l.device, dir, model.Options{Class: numericClass(f.Class), Progress: update})
	done()
	if err != nil {
		return err
	}
	return f.start(l, log, change)
}

// start starts the engine on what was loaded.
func (f engineFlags) start(l *loaded, log *slog.Logger, change []func(*engine.Options)) (err error) {
	opts := engine.Options{
		Device: l.device, Model: l.model, Tokenizer: l.tok, Name: l.name, Log: log,
		PageBytes: int64(f.PageBytes), SnapshotBytes: int64(f.SnapshotBytes), HostBytes: hostBytes(f.HostBytes),
	}
	for _, set := range change {
		set(&opts)
	}
	l.engine, err = engine.New(opts)
	switch {
	case errors.Is(err, engine.ErrBudget):
		return fmt.Errorf("--page-bytes, --snapshot-bytes: %w", err)
	case errors.Is(err, engine.ErrDiskTier):
		return fmt.Errorf("--disk-dir %s, --disk-bytes %d: %w", opts.DiskDir, opts.DiskBytes, err)
	}
	return err
}

// hostBytes says to the engine that 0 means none.
func hostBytes(b byteSize) int64 {
	if b == 0 {
		return -1
	}
	return int64(b)
}

// modelDir finds a model's folder and its name for people. The built-in one is
// written to a cache folder once, since models are mapped from files.
func modelDir(model string) (dir, name string, err error) {
	if model == nanoName {
		cache, err := cacheDir()
		if err != nil {
			return "", "", err
		}
		dir, err := nano.Extract(filepath.Join(cache, "models"))
		return dir, nanoName, err
	}
	info, err := os.Stat(model)
	switch {
	case errors.Is(err, os.ErrNotExist):
		return "", "", fmt.Errorf("model %s: there is no such folder (nano is built in)", model)
	case err != nil:
		return "", "", fmt.Errorf("model %s: %w", model, err)
	case !info.IsDir():
		return "", "", fmt.Errorf("model %s: not a folder; want one with config.json, safetensors and tokenizer.json", model)
	}
	if _, err := os.Stat(filepath.Join(model, "config.json")); err != nil {
		return "", "", fmt.Errorf("model %s: not a model: it has no config.json", model)
	}
	absolute, err := filepath.Abs(model)
	if err != nil {
		return "", "", fmt.Errorf("model %s: %w", model, err)
	}
	return absolute, filepath.Base(absolute), nil
}

// cacheDir is for what can be made again.
func cacheDir() (string, error) {
	if dir, err := os.UserCacheDir(); err == nil {
		return filepath.Join(dir, "rocket"), nil
	}
	// No home: a service. Everybody may write where temporary files lie, so the
	// folder must be ours alone before a model in it is trusted.
	dir := filepath.Join(os.TempDir(), fmt.Sprintf("rocket-%d", os.Getuid()))
	if err := os.Mkdir(dir, 0o700); err != nil && !errors.Is(err, os.ErrExist) {
		return "", fmt.Errorf("make cache folder: %w", err)
	}
	info, err := os.Lstat(dir)
	if err != nil {
		return "", fmt.Errorf("check cache folder: %w", err)
	}
	if st, ok := info.Sys().(*syscall.Stat_t); !info.IsDir() || info.Mode().Perm()&0o022 != 0 || ok && int(st.Uid) != os.Getuid() {
		return "", fmt.Errorf("cache folder %s is not this user's alone: remove it, or set HOME", dir)
	}
	return dir, nil
}
