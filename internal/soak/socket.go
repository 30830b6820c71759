package soak

import (
	"context"
	"encoding/json"
	"fmt"

	"github.com/coder/websocket"

	"rocket/client"
)

const (
	socketRef   = "soak"
	behindAll   = int64(1) << 40 // no event has such a seq: a socket that is opened for a command gets none
	onSocketOne = 4              // of so many commands one goes over a socket first, and only repetitions over HTTP
)

// onSocket sends a command as a frame and waits for its reply. A call with the
// same key over HTTP is the same call.
func onSocket[T any](ctx context.Context, api *client.Client, session, kind string, o client.CallOptions, request any) (T, error) {
	var zero T
	frame := map[string]any{}
	data, err := json.Marshal(request)
	if err == nil {
		err = json.Unmarshal(data, &frame)
	}
	if err != nil {
		return zero, fmt.Errorf("make frame: %w", err)
	}
	frame["type"], frame["ref"], frame["idempotency_key"] = kind, socketRef, o.IdempotencyKey
	if data, err = json.Marshal(frame); err != nil {
		return zero, fmt.Errorf("make frame: %w", err)
	}
	conn, err := api.Dial(ctx, session, client.Position{From: behindAll})
	if err != nil {
		return zero, err
	}
	defer conn.CloseNow()
	if err := conn.Write(ctx, websocket.MessageText, data); err != nil {
		return zero, fmt.Errorf("send frame: %w", err)
	}
	for {
		_, data, err := conn.Read(ctx)
		if err != nil {
			return zero, fmt.Errorf("read frame: %w", err)
		}
		var reply struct {
			Type, Ref string
			Result    T
		}
		if err := json.Unmarshal(data, &reply); err != nil {
			return zero, fmt.Errorf("decode frame: %w", err)
		}
		switch {
		case reply.Type == "error":
			e := &client.Error{}
			if err := json.Unmarshal(data, e); err != nil {
				return zero, fmt.Errorf("decode frame: %w", err)
			}
			return zero, e
		case reply.Type == "reply" && reply.Ref == socketRef:
			return reply.Result, nil
		}
	}
}

// command makes a mutating call that may go over a socket.
func command[T any](ctx context.Context, a *agent, what string, s *session, kind string, request any, same func(T) string,
	rest func(ctx context.Context, api *client.Client, o client.CallOptions) (T, error)) (T, error) {
	socket := a.r.IntN(onSocketOne) == 0
	return mutate(ctx, a, what, s, same, func(ctx context.Context, api *client.Client, o client.CallOptions) (T, error) {
		if socket {
			socket = false
			return onSocket[T](ctx, api, s.id, kind, o, request)
		}
		return rest(ctx, api, o)
	})
}
