package main

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"fmt"
	"log/slog"
	"net/netip"
	"os"
	"sync"
	"time"

	"rocket/server"
	"rocket/sessions"
)

// certificateLook is how often a certificate's files are looked at for a newer
// one.
const certificateLook = time.Minute

// access is who may reach the server, whom it reaches, and whom it believes.
type access struct {
	tls     *tls.Config    // nil: plain HTTP
	peers   *x509.CertPool // of other servers; nil: the system's
	proxies []netip.Prefix
}

// checkAccess refuses flags that would leave the server open or unreachable,
// and loads certificates.
func (s serveCmd) checkAccess(log *slog.Logger) (a access, err error) {
	if err = s.checkAdvertise(); err != nil {
		return a, err
	}
	if a.tls, err = s.checkListen(log); err != nil {
		return a, err
	}
	if a.proxies, err = s.trustedProxies(); err != nil {
		return a, err
	}
	a.peers, err = s.peerRoots()
	return a, err
}

// checkListen refuses to serve everybody without keys, and loads the
// certificate.
func (s serveCmd) checkListen(log *slog.Logger) (*tls.Config, error) {
	loopback, err := server.Loopback(s.Listen)
	if err != nil {
		return nil, err
	}
	if !loopback && s.Auth == "off" {
		return nil, usage("--auth off: without API keys the server listens on 127.0.0.1, [::1] and localhost only, not on %q", s.Listen)
	}
	if (s.TLSCert == "") != (s.TLSKey == "") {
		return nil, usage("--tls-cert and --tls-key: want both or none")
	}
	if s.TLSCert == "" {
		if !loopback {
			log.Warn("serving plain HTTP to other machines: keys and text can be read on the way; give --tls-cert and --tls-key, or put a proxy before")
		}
		return nil, nil
	}
	c := &certificate{certFile: s.TLSCert, keyFile: s.TLSKey, log: log}
	if err := c.load(); err != nil {
		return nil, err
	}
	return &tls.Config{MinVersion: tls.VersionTLS12, GetCertificate: c.get}, nil
}

// trustedProxies are the reverse proxies that are believed about addresses.
func (s serveCmd) trustedProxies() ([]netip.Prefix, error) {
	var all []netip.Prefix
	for _, text := range s.TrustedProxy {
		p, err := server.ParseProxy(text)
		if err != nil {
			return nil, usage("--trusted-proxy %v", err)
		}
		all = append(all, p)
	}
	return all, nil
}

// needKeys says whether calls need a key, as it stands at the start.
func (s serveCmd) needKeys(ctx context.Context, keys *sessions.Keys, log *slog.Logger) (bool, error) {
	made, err := keys.Exist(ctx)
	if err != nil {
		return false, fmt.Errorf("look for API keys: %w", err)
	}
	if s.Auth == "off" {
		if made {
			log.Warn("there are API keys, but --auth off lets everybody on this machine in without")
		}
		return false, nil
	}
	loopback, err := server.Loopback(s.Listen)
	if err != nil {
		return false, err
	}
	need := s.Auth == "required" || !loopback || made
	if need && !made {
		log.Warn("calls need an API key and there is none yet: rocket key create makes one")
	}
	return need, nil
}

// certificate is a certificate in files that may be renewed.
type certificate struct {
	certFile, keyFile string
	log               *slog.Logger

	mu     sync.Mutex
	pair   *tls.Certificate // guarded by mu
	looked time.Time        // guarded by mu
	made   time.Time        // guarded by mu; the newer file's
}

// load reads the files.
func (c *certificate) load() error {
	made, err := c.changed()
	if err != nil {
		return fmt.Errorf("read certificate: %w", err)
	}
	pair, err := tls.LoadX509KeyPair(c.certFile, c.keyFile)
	if err != nil {
		return fmt.Errorf("read certificate %s with key %s: %w", c.certFile, c.keyFile, err)
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	c.pair, c.made, c.looked = &pair, made, time.Now()
	return nil
}

// changed is when the newer of the files was written.
func (c *certificate) changed() (time.Time, error) {
	var newest time.Time
	for _, name := range []string{c.certFile, c.keyFile} {
		info, err := os.Stat(name)
		if err != nil {
			return newest, err
		}
		if info.ModTime().After(newest) {
			newest = info.ModTime()
		}
	}
	return newest, nil
}

// get is tls.Config.GetCertificate. A renewed pair that cannot be read leaves
// the old one in use: it may be half written.
func (c *certificate) get(*tls.ClientHelloInfo) (*tls.Certificate, error) {
	c.mu.Lock()
	due := time.Since(c.looked) >= certificateLook
	if due {
		c.looked = time.Now()
	}
	pair, made := c.pair, c.made
	c.mu.Unlock()
	if !due {
		return pair, nil
	}
	if now, err := c.changed(); err != nil || !now.After(made) {
		return pair, nil
	}
	if err := c.load(); err != nil {
		c.log.Warn("the renewed certificate is not used", "error", err)
		return pair, nil
	}
	c.log.Info("using the renewed certificate")
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.pair, nil
}
