//go:build !linux

package tier

import "os"

// directFlag is empty: I/O is buffered.
const directFlag = 0

// allocate makes a sparse file of that length. A write may fail for lack of room.
func allocate(f *os.File, size int64) error { return f.Truncate(size) }
