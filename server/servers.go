package server

import (
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"strings"
	"time"

	"github.com/danielgtaylor/huma/v2"

	"rocket/sessions"
)

const (
	pathRelease = "/v1/sessions/{id}/release"
	pathServers = "/v1/servers"

	// pruneRounds is how often other servers are asked to let go of a subtree
	// that is to be deleted; it may grow there meanwhile. Then it is refused.
	pruneRounds = 4
	prunePause  = 100 * time.Millisecond // before each but the first, doubled
)

type credentialsKey struct{}

// withCredentials keeps what a caller proved itself with, for calls that this
// server makes in its name.
func withCredentials(ctx context.Context, h http.Header) context.Context {
	return context.WithValue(ctx, credentialsKey{}, h)
}

// ServerList is the servers of the ledger, oldest first.
type ServerList struct {
	Data []sessions.Server `json:"data"`
}

type releaseInput struct {
	Mutation
	SessionInput
	Body *sessions.ReleaseRequest
}

func (s *Server) registerServers() {
	register(s, huma.Operation{OperationID: "list-servers", Method: http.MethodGet, Path: pathServers, Tags: []string{tagSystem},
		Summary: "List the servers of the ledger", Description: "Each has a lease and sessions of its own; calls may come to any of them."}, s.listServers)
	register(s, huma.Operation{OperationID: "release-session", Method: http.MethodPost, Path: pathRelease, Tags: []string{tagSessions},
		Summary: "Have a session's server give it up", Description: "The server that is called next with the session has it from then on. What is cached of it stays where it is, as a cache. " +
			"409 turn_in_progress while a turn is open, unless cancel is set. What is nobody's already is no error; a repeated call with its key gets the first one's answer wherever it comes to."}, s.releaseSession)
}

func (s *Server) listServers(ctx context.Context, _ *struct{}) (*body[ServerList], error) {
	list, err := s.manager.Servers(ctx)
	return answer(s, ServerList{Data: list}, err)
}

func (s *Server) releaseSession(ctx context.Context, in *releaseInput) (*body[sessions.ReleaseResult], error) {
	req := valueOf(in.Body)
	c, err := call(ctx, in.IdempotencyKey, routeOf(http.MethodPost, pathRelease, in.ID), req, false)
	if err != nil {
		return nil, s.problem(err)
	}
	got, err := s.manager.Release(ctx, c, in.ID, req)
	return answer(s, got, err)
}

// prune deletes a subtree, of which other servers may have sessions: those
// give them up first. They cancel turns for that, so nobody lets go of anything
// before all have said that they would, and this server has nothing against it.
// What refuses it after that, such as a server that dies or a ledger that goes
// away in between, leaves sessions that nobody has, and no turns in them.
func (s *Server) prune(ctx context.Context, c sessions.Call, id string) error {
	var asked error // why another server does not let go
	for round := 0; ; round++ {
		err := s.manager.Prune(ctx, c, id)
		if !errors.Is(err, sessions.ErrForeign) {
			return err
		}
		if round == pruneRounds {
			return cmp.Or(asked, err)
		}
		if round > 0 {
			select {
			case <-time.After(prunePause << round):
			case <-ctx.Done():
				return ctx.Err()
			}
		}
		owners, err := s.manager.SubtreeOwners(ctx, c.Tenant, id)
		if err != nil {
			return err
		}
		if asked = s.askAll(ctx, owners, id); asked != nil {
			s.log.Debug("another server does not release a subtree", "session", id, "err", asked)
			continue
		}
		ctx = context.WithoutCancel(ctx) // turns were cancelled: a client that leaves does not leave it at that
	}
}

// askAll has all other servers give up what they have of a subtree, or none.
func (s *Server) askAll(ctx context.Context, owners []sessions.SubtreeOwner, id string) error {
	for _, check := range []bool{true, false} {
		if !check {
			ctx = context.WithoutCancel(ctx)
		}
		asked := map[string]bool{}
		for _, o := range owners {
			if asked[o.Server] {
				continue
			}
			asked[o.Server] = true
			if err := s.askRelease(ctx, o.Place, id, check); err != nil {
				return err
			}
		}
	}
	return nil
}

// askRelease has another server give up what it has of a subtree, in the
// name of the caller that ctx is of; with check it only says whether it would.
func (s *Server) askRelease(ctx context.Context, p sessions.Place, id string, check bool) error {
	base, err := peerURL(p.Address)
	if err != nil {
		return err
	}
	limited, cancel := context.WithTimeoutCause(ctx, s.opts.CallTimeout, errPeerGone)
	defer cancel()
	defer context.AfterFunc(p.Alive, cancel)()
	base.Path = strings.Replace(pathRelease, "{id}", id, 1)
	body, err := json.Marshal(sessions.ReleaseRequest{Subtree: true, Cancel: true, Check: check})
	if err != nil {
		return fmt.Errorf("release: %w", err)
	}
	req, err := http.NewRequestWithContext(limited, http.MethodPost, base.String(), bytes.NewReader(body))
	if err != nil {
		return fmt.Errorf("release: %w", err)
	}
	from, _ := ctx.Value(credentialsKey{}).(http.Header)
	req.Header = s.peerHeader(from)
	req.Header.Set("Content-Type", "application/json")
	resp, err := s.peers.transport.RoundTrip(req)
	if notTaken(err) {
		_, err = s.unreachable(ctx, p, false)
		return err
	}
	if err != nil {
		s.log.Debug("another server did not answer", "server", p.Server, "address", p.Address, "err", err)
		return cmp.Or(ctx.Err(), errPeerGone)
	}
	defer resp.Body.Close()
	text, err := io.ReadAll(io.LimitReader(resp.Body, refusalMax))
	if err == nil && resp.StatusCode != http.StatusOK {
		return (&refusal{resp.StatusCode, resp.Header, text}).problem()
	}
	return err
}
