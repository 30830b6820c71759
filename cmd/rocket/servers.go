package main

import (
	"context"
	"crypto/x509"
	"fmt"
	"log/slog"
	"net"
	"net/netip"
	"net/url"
	"os"
	"text/tabwriter"

	"rocket/client"
	"rocket/sessions"
)

// checkAdvertise refuses an address that other servers could not call.
func (s serveCmd) checkAdvertise() error {
	if s.Advertise == "" {
		return nil
	}
	u, err := url.Parse(s.Advertise)
	if err != nil || u.Scheme != "http" && u.Scheme != "https" || u.Hostname() == "" || u.User != nil ||
		u.Path != "" && u.Path != "/" || u.RawQuery != "" || u.Fragment != "" {
		return usage("--advertise %q: want http://HOST:PORT or https://HOST:PORT", s.Advertise)
	}
	if ip, err := netip.ParseAddr(u.Hostname()); err == nil && ip.IsUnspecified() {
		return usage("--advertise %q: want an address that other machines can call", s.Advertise)
	}
	return nil
}

// advertised is the base URL under which other servers of the ledger reach
// this one, "" if they cannot. A private ledger has no others.
func (s serveCmd) advertised(addr net.Addr) string {
	if s.Advertise != "" {
		u, err := url.Parse(s.Advertise)
		if err != nil {
			return "" // checkAdvertise has refused it
		}
		return u.Scheme + "://" + u.Host
	}
	ip, err := netip.ParseAddrPort(addr.String())
	if err != nil || ip.Addr().IsUnspecified() || s.DatabaseURL == "" {
		return ""
	}
	if s.TLSCert != "" {
		return "https://" + addr.String()
	}
	return "http://" + addr.String()
}

// peerRoots is whom to trust about certificates of other servers; nil: the system's roots.
func (s serveCmd) peerRoots() (*x509.CertPool, error) {
	if s.PeerCA == "" {
		return nil, nil
	}
	pem, err := os.ReadFile(s.PeerCA)
	if err != nil {
		return nil, fmt.Errorf("read --peer-ca: %w", err)
	}
	roots, err := x509.SystemCertPool()
	if err != nil {
		return nil, fmt.Errorf("read the system's certificates: %w", err)
	}
	if !roots.AppendCertsFromPEM(pem) {
		return nil, fmt.Errorf("--peer-ca %s: no certificate in PEM", s.PeerCA)
	}
	return roots, nil
}

// noticePeers says in the log which servers on the ledger cannot call each other.
func noticePeers(ctx context.Context, m *sessions.Manager, address string, log *slog.Logger) error {
	list, err := m.Servers(ctx)
	if err != nil {
		return err
	}
	for _, v := range list {
		switch {
		case v.Self || !v.Alive:
		case address == "":
			log.Warn("another server shares the ledger and cannot reach this one: give --advertise", "server", v.ID, "address", v.Address)
		case v.Address == address:
			log.Warn("another server on the ledger has the same address: give each its --advertise", "server", v.ID, "address", v.Address)
		case v.Address == "":
			log.Warn("another server shares the ledger and cannot be reached: start it with --advertise", "server", v.ID)
		default:
			log.Info("shares the ledger with another server", "server", v.ID, "address", v.Address)
		}
	}
	return nil
}

type serversCmd struct {
	remote
}

func (s serversCmd) Run(c *console) error {
	api, err := s.connect()
	if err != nil {
		return err
	}
	defer api.Close()
	list, err := api.Servers(c.ctx)
	if err != nil {
		return err
	}
	if c.json {
		return c.print(client.ServerList{Data: list})
	}
	w := tabwriter.NewWriter(c.out, 0, 0, 2, ' ', 0)
	fmt.Fprintln(w, "ID\tALIVE\tADDRESS\tMODEL\tCLASS\tSTARTED")
	for _, v := range list {
		alive := "yes"
		if !v.Alive {
			alive = "no"
		}
		if v.Self {
			alive += ", here"
		}
		if v.Address == "" {
			v.Address = "-"
		}
		fmt.Fprintf(w, "%s\t%s\t%s\t%s\t%s\t%s\n", v.ID, alive, v.Address, v.Model, v.ParityClass, ago(v.StartedAt))
	}
	if err := w.Flush(); err != nil {
		return fmt.Errorf("write: %w", err)
	}
	return nil
}

type sessionRelease struct {
	ID      string `arg:"" help:"Session."`
	Subtree bool   `help:"Everything forked from it too, as far as that server has it."`
	Cancel  bool   `help:"Cancel open turns; else a session with one is refused."`
}

func (r sessionRelease) Run(c *console, cmds *commands) error {
	api, err := cmds.Session.connect()
	if err != nil {
		return err
	}
	defer api.Close()
	got, err := api.Release(c.ctx, r.ID, client.ReleaseRequest{Subtree: r.Subtree, Cancel: r.Cancel})
	if err != nil {
		return err
	}
	if c.json {
		return c.print(got)
	}
	c.say("%d sessions released", got.Released)
	return nil
}
