package bench

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"time"
)

// cpuTime is a process's CPU, the engine's threads apart.
type cpuTime struct {
	server, engine time.Duration
	monitor        time.Duration // of server: the Go runtime's own thread that looks after the others
}

// engineThreads begin with this name.
const engineThreads = "rk-"

// cpuOf sums the threads of a process, from /proc.
func cpuOf(pid int) (cpuTime, error) {
	tasks, err := filepath.Glob(fmt.Sprintf("/proc/%d/task/*", pid))
	if err != nil || len(tasks) == 0 {
		return cpuTime{}, fmt.Errorf("no threads of process %d under /proc: %w", pid, err)
	}
	var out cpuTime
	monitor := 0
	for _, path := range tasks {
		name, d, err := threadTime(path)
		if errors.Is(err, os.ErrNotExist) {
			continue // the thread has ended; the runtime keeps almost all of its threads
		}
		if err != nil {
			return out, fmt.Errorf("read a thread's times: %w", err)
		}
		if strings.HasPrefix(name, engineThreads) {
			out.engine += d
			continue
		}
		out.server += d
		// The first thread that a Go process makes is the monitor.
		if id, _ := strconv.Atoi(filepath.Base(path)); id > pid && (monitor == 0 || id < monitor) {
			monitor, out.monitor = id, d
		}
	}
	return out, nil
}

// threadTime reads a thread's name and its CPU: in nanoseconds where the kernel
// counts them, else in its ticks.
func threadTime(path string) (name string, cpu time.Duration, err error) {
	text, err := os.ReadFile(filepath.Join(path, "stat"))
	if err != nil {
		return "", 0, err
	}
	name, ticks, err := parseStat(string(text))
	if err != nil {
		return "", 0, err
	}
	if fine, err := os.ReadFile(filepath.Join(path, "schedstat")); err == nil {
		first, _, _ := strings.Cut(string(fine), " ")
		if n, err := strconv.ParseInt(first, 10, 64); err == nil && n > 0 {
			return name, time.Duration(n), nil
		}
	}
	return name, time.Duration(ticks) * time.Second / ticksPerSecond, nil
}

// ticksPerSecond is the unit of /proc's times: USER_HZ, 100 on Linux whatever the kernel's own rate.
const ticksPerSecond = 100

// parseStat reads a thread's name and its user and system ticks: fields 2, 14 and 15 of proc_pid_stat(5). The name may
// hold spaces and brackets.
func parseStat(text string) (name string, ticks int64, err error) {
	open, end := strings.IndexByte(text, '('), strings.LastIndexByte(text, ')')
	if open < 0 || end < open {
		return "", 0, fmt.Errorf("no thread name in %q", text)
	}
	fields := strings.Fields(text[end+1:])
	if len(fields) < 13 {
		return "", 0, fmt.Errorf("%d fields after the name", len(fields))
	}
	for _, f := range fields[11:13] {
		n, err := strconv.ParseInt(f, 10, 64)
		if err != nil {
			return "", 0, fmt.Errorf("times: %w", err)
		}
		ticks += n
	}
	return text[open+1 : end], ticks, nil
}

// ownCPU is what this process has used.
func ownCPU() (time.Duration, error) {
	var u syscall.Rusage
	if err := syscall.Getrusage(syscall.RUSAGE_SELF, &u); err != nil {
		return 0, fmt.Errorf("read own CPU: %w", err)
	}
	return time.Duration(u.Utime.Nano() + u.Stime.Nano()), nil
}

// residentOf is a process's resident memory in bytes.
func residentOf(pid int) (int64, error) {
	text, err := os.ReadFile(fmt.Sprintf("/proc/%d/statm", pid))
	if err != nil {
		return 0, fmt.Errorf("read memory use: %w", err)
	}
	fields := strings.Fields(string(text))
	if len(fields) < 2 {
		return 0, fmt.Errorf("memory use is %q", text)
	}
	pages, err := strconv.ParseInt(fields[1], 10, 64)
	if err != nil {
		return 0, fmt.Errorf("memory use: %w", err)
	}
	return pages * int64(os.Getpagesize()), nil
}
