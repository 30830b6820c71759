package testaddr

import (
	"errors"
	"net"
	"syscall"
	"testing"
)

func TestRefusing(t *testing.T) {
	address := Refusing(t)
	for range 3 {
		if conn, err := net.Dial("tcp", address); !errors.Is(err, syscall.ECONNREFUSED) {
			t.Fatalf("%v, %v", conn, err)
		}
	}
	if ln, err := net.Listen("tcp", address); err == nil {
		ln.Close()
		t.Error("somebody else got the port")
	}
}

func TestFree(t *testing.T) {
	address := Free(t)
	for range 3 {
		ln, err := net.Listen("tcp", address)
		if err != nil {
			t.Fatal(err)
		}
		ln.Close()
	}
	if _, err := net.ListenPacket("udp", address); err == nil {
		t.Error("another test could get it")
	}
}
