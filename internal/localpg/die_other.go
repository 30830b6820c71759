//go:build !linux

package localpg

import "syscall"

func dieWithParent(*syscall.SysProcAttr) {}
