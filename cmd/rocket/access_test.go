package main

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"encoding/json"
	"encoding/pem"
	"log/slog"
	"math/big"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"rocket/client"
	"rocket/sessions"
)

// writeCertificate makes a self-signed certificate of 127.0.0.1 with a serial
// number, and returns its files and itself.
func writeCertificate(t *testing.T, dir string, serial int64) (certFile, keyFile string, cert *x509.Certificate) {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	template := &x509.Certificate{SerialNumber: big.NewInt(serial), NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(time.Hour),
		IPAddresses: []net.IP{net.IPv4(127, 0, 0, 1)}, IsCA: true, BasicConstraintsValid: true}
	der, err := x509.CreateCertificate(rand.Reader, template, template, &key.PublicKey, key)
	if err != nil {
		t.Fatal(err)
	}
	secret, err := x509.MarshalPKCS8PrivateKey(key)
	if err != nil {
		t.Fatal(err)
	}
	certFile, keyFile = filepath.Join(dir, "cert.pem"), filepath.Join(dir, "key.pem")
	for name, block := range map[string]*pem.Block{certFile: {Type: "CERTIFICATE", Bytes: der}, keyFile: {Type: "PRIVATE KEY", Bytes: secret}} {
		if err := os.WriteFile(name, pem.EncodeToMemory(block), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	if cert, err = x509.ParseCertificate(der); err != nil {
		t.Fatal(err)
	}
	return certFile, keyFile, cert
}

// TestKeysAndTLS: keys made beside a server that does not run and beside one
// that does, HTTPS, and what a command without a key is told.
func TestKeysAndTLS(t *testing.T) {
	data, dir := dataDirectory(t), t.TempDir()
	certFile, keyFile, cert := writeCertificate(t, dir, 1)
	create := func(args ...string) sessions.NewKey {
		t.Helper()
		var k sessions.NewKey
		code, out, errOut := rocket(t, append([]string{"key", "create", "--json", "--data-dir", data}, args...)...)
		if err := json.Unmarshal([]byte(out), &k); code != 0 || err != nil || errOut != "" {
			t.Fatalf("exit %d, %v, %q, %q", code, err, out, errOut)
		}
		return k
	}
	first := create("laptop")
	s := serve(t, "--listen", "127.0.0.1:0", "--data-dir", data, "--tls-cert", certFile, "--tls-key", keyFile, "--log-level", "debug")
	if !strings.HasPrefix(s.url, "https://") {
		t.Fatalf("it serves at %s", s.url)
	}
	second := create("--tenant", "search", "--admin")
	if first.Tenant != sessions.DefaultTenant || first.Name != "laptop" || first.Admin || second.Tenant != "search" || !second.Admin {
		t.Errorf("%+v, %+v", first.Key, second.Key)
	}
	roots := x509.NewCertPool()
	roots.AddCert(cert)
	with := func(secret string) *client.Client {
		transport := &http.Transport{TLSClientConfig: &tls.Config{RootCAs: roots}, ForceAttemptHTTP2: true}
		api, err := client.New(s.url, client.Options{APIKey: secret, Retries: -1, HTTP: &http.Client{Transport: transport}})
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(api.Close)
		return api
	}
	ctx := testContext(t)
	mine, err := with(first.Secret).Create(ctx, client.CreateRequest{}, client.CallOptions{})
	if err != nil {
		t.Fatal(err)
	}
	for range with(first.Secret).Follow(ctx, mine.ID, client.Position{}, client.FollowOptions{}) { // a WebSocket over TLS
		break
	}
	if _, err := with(second.Secret).Get(ctx, mine.ID); client.CodeOf(err) != "not_found" {
		t.Errorf("another tenant: %v", err)
	}
	if _, err := with("").Get(ctx, mine.ID); client.CodeOf(err) != "unauthenticated" {
		t.Errorf("without a key: %v", err)
	}
	cmd := command(t, "session", "ls", "--server", s.url)
	cmd.Env = append(cmd.Env, "SSL_CERT_FILE="+certFile, "ROCKET_API_KEY="+first.Secret)
	if out, err := cmd.CombinedOutput(); err != nil || !strings.Contains(string(out), mine.ID) {
		t.Errorf("session ls: %v: %s", err, out)
	}
	code, out, _ := rocket(t, "key", "limits", "search", "--sessions", "0", "--tokens-per-minute", "5", "--resident-bytes", "3GiB", "--json", "--data-dir", data)
	if code != 0 || out != `{"sessions":0,"concurrent_turns":null,"tokens_per_minute":5,"resident_bytes":3221225472}`+"\n" {
		t.Errorf("limits: exit %d, %s", code, out)
	}
	code, out, _ = rocket(t, "key", "limits", "search", "--sessions", "default", "--data-dir", data) // the others stay
	if code != 0 || out != "sessions default, concurrent turns default, tokens a minute 5, resident bytes 3221225472\n" {
		t.Errorf("limits: exit %d, %s", code, out)
	}
	if code, _, errOut := rocket(t, "key", "limits", "search", "--resident-bytes", "3XB", "--data-dir", data); code != exitUsage || !oneLine(errOut) {
		t.Errorf("limits: exit %d, %s", code, errOut)
	}
	if code, out, _ := rocket(t, "key", "ls", "--data-dir", data); code != 0 || strings.Count(out, "\n") != 3 || !strings.Contains(out, first.ID) || strings.Contains(out, "rk_") {
		t.Errorf("ls: exit %d\n%s", code, out)
	}
	if code, out, errOut := rocket(t, "key", "revoke", second.ID, "--data-dir", data); code != 0 || !strings.Contains(out, second.ID) {
		t.Errorf("revoke: exit %d, %q, %q", code, out, errOut)
	}
	if code, _, errOut := rocket(t, "key", "revoke", "key_x", "--data-dir", data); code != exitFailed || !oneLine(errOut) {
		t.Errorf("revoke of nothing: exit %d, %q", code, errOut)
	}
	if code := s.end(t, syscall.SIGTERM); code != 0 {
		t.Errorf("exit %d", code)
	}
	for _, k := range []sessions.NewKey{first, second} {
		if strings.Contains(s.stderr.String(), k.Secret) {
			t.Error("the log has a key")
		}
	}
}

// TestCertificateIsReadAgain: a renewed pair is used, half of one is not.
func TestCertificateIsReadAgain(t *testing.T) {
	dir := t.TempDir()
	certFile, keyFile, _ := writeCertificate(t, dir, 1)
	c := &certificate{certFile: certFile, keyFile: keyFile, log: slog.New(slog.DiscardHandler)}
	if err := c.load(); err != nil {
		t.Fatal(err)
	}
	serial := func() int64 {
		t.Helper()
		c.looked = time.Time{}
		pair, err := c.get(nil)
		if err != nil {
			t.Fatal(err)
		}
		return pair.Leaf.SerialNumber.Int64()
	}
	if got := serial(); got != 1 {
		t.Errorf("serial %d", got)
	}
	newer := time.Now().Add(time.Minute)
	if err := os.WriteFile(certFile, []byte("half of one"), 0o600); err != nil {
		t.Fatal(err)
	}
	if err := os.Chtimes(certFile, newer, newer); err != nil {
		t.Fatal(err)
	}
	if got := serial(); got != 1 {
		t.Errorf("serial %d of half a pair", got)
	}
	writeCertificate(t, dir, 2)
	if err := os.Chtimes(certFile, newer, newer); err != nil {
		t.Fatal(err)
	}
	if got := serial(); got != 2 {
		t.Errorf("serial %d, want the renewed one", got)
	}
}

func TestCheckAccess(t *testing.T) {
	for _, c := range []struct {
		listen, auth string
		ok           bool
	}{
		{"127.0.0.1:0", "off", true}, {"127.0.0.1:0", "auto", true}, {"0.0.0.0:0", "auto", true}, {"[::]:1", "required", true},
		{"0.0.0.0:0", "off", false}, {":8080", "off", false}, {"example.com:1", "off", false}, {"nonsense", "auto", false},
	} {
		_, err := serveCmd{Listen: c.listen, Auth: c.auth}.checkAccess(slog.New(slog.DiscardHandler))
		if (err == nil) != c.ok {
			t.Errorf("--listen %s --auth %s: %v", c.listen, c.auth, err)
		}
	}
}

func TestTrustedProxies(t *testing.T) {
	got, err := serveCmd{Listen: "127.0.0.1:0", TrustedProxy: []string{"10.0.0.5", "10.1.0.0/16"}}.checkAccess(slog.New(slog.DiscardHandler))
	if err != nil || len(got.proxies) != 2 || got.proxies[0].String() != "10.0.0.5/32" {
		t.Errorf("%v, %v", got.proxies, err)
	}
	for _, text := range []string{"proxy.example", "0.0.0.0/0", ""} {
		_, err := serveCmd{Listen: "127.0.0.1:0", TrustedProxy: []string{text}}.checkAccess(slog.New(slog.DiscardHandler))
		if err == nil || !strings.Contains(err.Error(), "--trusted-proxy") {
			t.Errorf("%q: %v", text, err)
		}
	}
}
