// Package testaddr gives tests addresses that nobody else gets while they run.
//
// A port that was listened on a moment ago is anybody's: other test processes
// run at the same time, and every connection that they open takes one.
package testaddr

import (
	"fmt"
	"math/rand/v2"
	"net"
	"syscall"
	"testing"
)

// Refusing is an address of loopback, host:port, that refuses connections until
// t ends: its port is taken, and nobody listens there.
func Refusing(t testing.TB) string {
	t.Helper()
	fd, err := syscall.Socket(syscall.AF_INET, syscall.SOCK_STREAM, 0)
	if err != nil {
		t.Fatal(err)
	}
	syscall.CloseOnExec(fd)
	t.Cleanup(func() { _ = syscall.Close(fd) })
	if err := syscall.Bind(fd, &syscall.SockaddrInet4{Addr: [4]byte{127, 0, 0, 1}}); err != nil {
		t.Fatal(err)
	}
	name, err := syscall.Getsockname(fd)
	if err != nil {
		t.Fatal(err)
	}
	return fmt.Sprintf("127.0.0.1:%d", name.(*syscall.SockaddrInet4).Port)
}

// Ports that systems hand out to connections and to listeners that name none
// begin above, at 32768 on Linux.
const firstPort, ports = 20_000, 12_000

// Free is an address of loopback, host:port, on which the processes of a test
// can listen one after the other.
func Free(t testing.TB) string {
	t.Helper()
	for range ports {
		address := fmt.Sprintf("127.0.0.1:%d", firstPort+rand.IntN(ports))
		mark, err := net.ListenPacket("udp", address) // for other tests that look for one
		if err != nil {
			continue
		}
		ln, err := net.Listen("tcp", address)
		if err != nil {
			mark.Close()
			continue
		}
		ln.Close()
		t.Cleanup(func() { mark.Close() })
		return address
	}
	t.Fatal("no port is free")
	return ""
}
