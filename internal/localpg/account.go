package localpg

import (
	"errors"
	"fmt"
	"os"
	"os/user"
	"path/filepath"
	"strconv"
	"syscall"
)

// account is the user who runs Postgres in place of root.
type account struct {
	name     string
	uid, gid int
}

// serviceAccount picks an unprivileged account if this process is root's.
func serviceAccount() (*account, error) {
	if os.Geteuid() != 0 {
		return nil, nil
	}
	for _, name := range []string{"postgres", "_postgres", "nobody"} {
		u, err := user.Lookup(name)
		if err != nil {
			continue
		}
		uid, err1 := strconv.Atoi(u.Uid)
		gid, err2 := strconv.Atoi(u.Gid)
		if err1 == nil && err2 == nil && uid > 0 {
			return &account{name, uid, gid}, nil
		}
	}
	return nil, errors.New("postgres refuses to run as root, and there is no user postgres or nobody to run it: start as another user")
}

// lockDir takes the lock file of a data directory, or says who has it.
func lockDir(path string) (unlock func(), err error) {
	f, err := os.OpenFile(path, os.O_RDWR|os.O_CREATE, 0o644)
	if err != nil {
		return nil, fmt.Errorf("open lock of the data directory: %w", err)
	}
	if err := syscall.Flock(int(f.Fd()), syscall.LOCK_EX|syscall.LOCK_NB); err != nil {
		defer f.Close()
		if !errors.Is(err, syscall.EWOULDBLOCK) {
			return nil, fmt.Errorf("lock %s: %w", path, err)
		}
		var pid [16]byte
		n, _ := f.ReadAt(pid[:], 0) // a hint only
		return nil, &InUseError{Path: path, PID: string(pid[:n])}
	}
	err = f.Truncate(0)
	if err == nil {
		_, err = f.WriteAt([]byte(strconv.Itoa(os.Getpid())), 0)
	}
	if err != nil {
		f.Close()
		return nil, fmt.Errorf("write %s: %w", path, err)
	}
	// the file stays: removing it would let two servers lock two files of one name
	return func() { f.Close() }, nil
}

// InUseError says that another server has the data directory.
type InUseError struct {
	Path string // of the lock
	PID  string // of the other server, "" if unknown
}

func (e *InUseError) Error() string {
	who := "another server"
	if e.PID != "" {
		who += " (process " + e.PID + ")"
	}
	return fmt.Sprintf("%s uses this data directory (it holds %s): stop it or choose another directory", who, e.Path)
}

// RunningURL is a connection string for the ledger of a cluster that another
// process runs: Start has said InUseError about dir.
func RunningURL(dir string) (string, error) {
	abs, err := filepath.Abs(dir)
	if err != nil {
		return "", fmt.Errorf("find data directory %s: %w", dir, err)
	}
	return (&Cluster{sock: SocketDir(abs)}).URL(), nil
}
