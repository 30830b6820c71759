// Package leaktest fails a package's tests when goroutines are left at their
// end. It waits for those that are on their way out: on a busy machine, or
// behind a connection that is still being closed, that takes its time.
package leaktest

import (
	"fmt"
	"os"
	"testing"
	"time"

	"go.uber.org/goleak"
)

// patience bounds the wait; a run without a leak does not wait this long.
const patience = 30 * time.Second

// Main runs the tests of m and ends the process.
func Main(m *testing.M, options ...goleak.Option) { os.Exit(Check(m.Run(), options...)) }

// Check is the exit code of tests that ended with code: 1 if they passed and
// left goroutines, which it prints.
func Check(code int, options ...goleak.Option) int {
	if code != 0 {
		return code
	}
	err := goleak.Find(options...)
	for end := time.Now().Add(patience); err != nil && time.Now().Before(end); {
		err = goleak.Find(options...) // takes half a second to find one
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	return 0
}
