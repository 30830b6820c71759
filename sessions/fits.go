package sessions

// A ledger may have sessions of other models than the one that this server
// runs: a server was started with another one, or several share the ledger.
// They are listed, patched, closed and deleted like all; what needs their
// model is refused.

// canRead refuses a session whose token ids mean something else here.
func (m *Manager) canRead(x *row) error {
	if x.tokDigest == m.info.TokenizerDigest {
		return nil
	}
	return fail(CodeModelMismatch, "the session is of model %q with another tokenizer; this server runs %q", x.model, m.info.Name)
}

// canRun refuses a session that this server would go on with differently than
// it began: other weights, or another numeric class.
func (m *Manager) canRun(x *row) error {
	switch {
	case x.tokDigest != m.info.TokenizerDigest || x.modelDigest != m.info.Digest:
		return fail(CodeModelMismatch, "the session is of model %q with other weights than this server's %q", x.model, m.info.Name)
	case x.parity != m.info.ParityClass:
		return fail(CodeModelMismatch, "the session is of class %s, this server runs class %s", x.parity, m.info.ParityClass)
	}
	return nil
}
