package main

import (
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"path/filepath"
	"syscall"

	"github.com/google/uuid"
)

// homeFile is the file in a data directory that names it, and whose lock a
// server holds for as long as its process lives.
const homeFile = "server"

// home is the data directory's name, "" for a server that has nothing to do
// with one, or cannot write there: it only makes a restart faster.
func (s serveCmd) home(log *slog.Logger) (name string, release func()) {
	if s.DataDir == "" && s.DatabaseURL != "" && (s.DiskBytes == 0 || s.DiskDir != "") {
		return "", func() {}
	}
	name, release, err := takeHome(dataDir(s.DataDir))
	if err != nil {
		log.Warn("after a crash this server's sessions may wait for its lease: its data directory has no name", "error", err)
	}
	return name, release
}

// takeHome gives the name of a data directory, which is made if there is none,
// and takes its lock. The lock goes with the process, however that ends, so
// whoever has it knows that the server which had it before is gone: its
// sessions need not wait for its lease. The name is "" when another process has
// the lock; such a server does without.
//
// A copied directory has the name of the first. That weakens nothing: a server
// is taken over only if its lock in the ledger is free too, and writes of one
// that lives all the same are refused by owner and epoch.
func takeHome(dir string) (name string, release func(), err error) {
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return "", func() {}, fmt.Errorf("make the data directory: %w", err)
	}
	f, err := os.OpenFile(filepath.Join(dir, homeFile), os.O_RDWR|os.O_CREATE, 0o644)
	if err != nil {
		return "", func() {}, fmt.Errorf("open the data directory's name: %w", err)
	}
	release = func() { _ = f.Close() } // nothing is written by then
	if name, err = lockHome(f); err != nil || name == "" {
		release()
		return "", func() {}, err
	}
	return name, release, nil
}

func lockHome(f *os.File) (name string, err error) {
	err = syscall.Flock(int(f.Fd()), syscall.LOCK_EX|syscall.LOCK_NB)
	if errors.Is(err, syscall.EWOULDBLOCK) {
		return "", nil
	}
	if err != nil {
		return "", fmt.Errorf("lock %s: %w", f.Name(), err)
	}
	text, err := io.ReadAll(io.LimitReader(f, 64))
	if err != nil {
		return "", fmt.Errorf("read %s: %w", f.Name(), err)
	}
	if id, err := uuid.ParseBytes(text); err == nil {
		return id.String(), nil
	}
	name = uuid.NewString() // it is new, or its first server died while it wrote
	if err := f.Truncate(0); err != nil {
		return "", fmt.Errorf("write %s: %w", f.Name(), err)
	}
	if _, err := f.WriteAt([]byte(name), 0); err != nil {
		return "", fmt.Errorf("write %s: %w", f.Name(), err)
	}
	return name, nil
}
