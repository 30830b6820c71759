package main

import (
	"time"

	"github.com/schollz/progressbar/v3"
)

// progress shows long work in bytes on standard error, if that is a terminal.
// The returned function may be called from one goroutine; done clears the bar.
func (c *console) progress(what string) (update func(done, total int64), done func()) {
	if !c.errTerminal || c.json {
		return func(int64, int64) {}, func() {}
	}
	var bar *progressbar.ProgressBar
	update = func(n, total int64) {
		if bar == nil {
			bar = progressbar.NewOptions64(total, progressbar.OptionSetWriter(c.err), progressbar.OptionSetDescription(what),
				progressbar.OptionShowBytes(true), progressbar.OptionUseIECUnits(true), progressbar.OptionSetWidth(30),
				progressbar.OptionThrottle(100*time.Millisecond), progressbar.OptionClearOnFinish())
		}
		_ = bar.Set64(n) // a terminal that is gone
	}
	return update, func() {
		if bar != nil {
			_ = bar.Finish() // as above
		}
	}
}
