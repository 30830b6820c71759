package tier

import (
	"errors"
	"os"
	"syscall"
)

// directFlag makes reads and writes go past the page cache.
const directFlag = syscall.O_DIRECT

// allocate makes the file that long and gives it all its blocks, so that writes within it find room. File systems that
// cannot get a sparse file: there a write may fail for lack of room.
func allocate(f *os.File, size int64) error {
	err := syscall.EINTR
	for err == syscall.EINTR {
		err = errnoOf(syscall.Fallocate(int(f.Fd()), 0, 0, size))
	}
	if err == 0 {
		return nil
	}
	if err == syscall.EOPNOTSUPP || err == syscall.ENOSYS {
		return f.Truncate(size)
	}
	return os.NewSyscallError("fallocate", err)
}

func errnoOf(err error) syscall.Errno {
	var no syscall.Errno
	errors.As(err, &no)
	return no
}
