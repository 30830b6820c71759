package sessions

import (
	"cmp"
	"context"
	"slices"
	"time"

	"github.com/jackc/pgx/v5"
)

// The quota of resident bytes is the engine's to keep: it knows a tenant by its
// salt, and evicts what is the tenant's own and inactive when that reaches the
// limit. Only while the tenant's open turns alone fill it are further turns and
// resumes refused (CodeLimit). This file tells the engine what the ledger says.

const noResidentLimit = int64(-1) // the engine's word for none

// setResident gives the engine a tenant's limit as last read, if it has another.
func (m *Manager) setResident(ctx context.Context, tenant string) error {
	if m.eng == nil {
		return nil
	}
	t := &m.known
	wanted := func() (salt string, limit int64, changed bool) {
		t.mu.Lock()
		defer t.mu.Unlock()
		x := t.rows[tenant]
		limit = noResidentLimit
		if q := x.quotas.ResidentBytes; q != nil {
			limit = *q
		}
		had, ok := t.set[tenant]
		return x.salt, limit, ok && had != limit || !ok && limit != noResidentLimit
	}
	if _, _, changed := wanted(); !changed {
		return nil
	}
	t.setting.Lock() // or an older limit could overtake a newer one
	defer t.setting.Unlock()
	salt, limit, changed := wanted()
	if !changed {
		return nil
	}
	if err := m.eng.SetNamespaceLimit(ctx, salt, limit); err != nil {
		return engineError("set limit", err, "")
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.set == nil {
		t.set = map[string]int64{}
	}
	t.set[tenant] = limit
	return nil
}

// readQuotas reads the quotas of all known tenants anew: a lowered limit of
// resident bytes holds for one that makes no calls too.
func (m *Manager) readQuotas(ctx context.Context) error {
	m.known.mu.Lock()
	ids := make([]string, 0, len(m.known.rows))
	for id := range m.known.rows {
		ids = append(ids, id)
	}
	m.known.mu.Unlock()
	if len(ids) == 0 {
		return nil
	}
	now := time.Now()
	rows, err := m.pool.Query(ctx, `SELECT id, `+quotaColumns+` FROM tenants WHERE id = ANY($1)`, ids)
	if err != nil {
		return ledgerError("read quotas", err)
	}
	var id string
	x := tenantInfo{at: now}
	if _, err := pgx.ForEachRow(rows, append([]any{&id}, x.fields()...), func() error {
		m.known.know(id, x)
		return nil
	}); err != nil {
		return ledgerError("read quotas", err)
	}
	for _, id := range ids {
		if err := m.setResident(ctx, id); err != nil {
			return err
		}
	}
	return nil
}

// TenantBytes is what a tenant's lines take on this server. Device and host
// together are resident.
type TenantBytes struct {
	Tenant             string
	Device, Host, Disk int64
	Limit              *int64 // of the resident ones; nil: none
}

// TenantBytes tells what the tenants take that this server has met since its
// start, those with most resident bytes first.
func (m *Manager) TenantBytes() []TenantBytes {
	if m.eng == nil {
		return nil
	}
	taken := m.eng.Namespaces()
	var out []TenantBytes
	m.known.mu.Lock()
	for id, x := range m.known.rows {
		n := taken[x.salt]
		out = append(out, TenantBytes{Tenant: id, Device: n.Device, Host: n.Host, Disk: n.Disk, Limit: x.quotas.ResidentBytes})
	}
	m.known.mu.Unlock()
	slices.SortFunc(out, func(a, b TenantBytes) int {
		return cmp.Or(cmp.Compare(b.Device+b.Host, a.Device+a.Host), cmp.Compare(a.Tenant, b.Tenant))
	})
	return out
}
