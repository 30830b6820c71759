package main

import (
	"log/slog"
	"syscall"
)

const (
	// connectionsMost is how many connections a server takes where the limit of
	// open files allows it.
	connectionsMost = 32_768

	// descriptorsKept are left for the ledger, the disk tier and other servers,
	// or a quarter where the limit is low.
	descriptorsKept = 1024
)

// connectionsMax is how many connections to take at once, so that they leave
// descriptors for everything else. The Go runtime has raised the soft limit to
// the hard one by now; what it starts (Postgres) gets the old one back.
func connectionsMax(log *slog.Logger) int {
	var limit syscall.Rlimit
	if err := syscall.Getrlimit(syscall.RLIMIT_NOFILE, &limit); err != nil {
		log.Warn("the limit of open files cannot be read", "err", err)
		return connectionsMost
	}
	n := connectionsOf(limit.Cur)
	if n < connectionsMost {
		log.Info("the limit of open files (ulimit -Hn) bounds connections", "files", limit.Cur, "connections", n)
	}
	return n
}

func connectionsOf(files uint64) int {
	kept := min(descriptorsKept, files/4)
	return int(max(1, min(connectionsMost, files-kept)))
}
