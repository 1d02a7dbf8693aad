"""A decode step's inputs from the state of rows, and how that state moves on, row by row in Python."""


def prepare(rows, token_ids, computed_len, tables, block_size, spare_row):
    """ids, positions, seq_lens, slots per group, block tables per group (each a list of lists)."""
    ids, positions, seq_lens = [], [], []
    slots, block_tables = [[] for _ in tables], [[] for _ in tables]
    for row in rows.tolist():
        position = int(computed_len[row])
        ids.append(max(int(token_ids[row, position]), 0))
        positions.append(position)
        seq_lens.append(position + 1)
        for g, table in enumerate(tables):
            block = int(table[row, position // block_size])
            is_null = block == 0 or row == spare_row
            slots[g].append(-1 if is_null else block * block_size + position % block_size)
            block_tables[g].append(table[row, : position // block_size + 1].tolist())
    return ids, positions, seq_lens, slots, block_tables


def advance(rows, computed_len, token_ids, next_ids, spare_row):
    """Changes computed_len and token_ids."""
    for row, next_id in zip(rows.tolist(), next_ids.tolist()):
        if row == spare_row:
            continue
        computed_len[row] += 1
        if computed_len[row] < token_ids.shape[1]:
            token_ids[row, computed_len[row]] = next_id
