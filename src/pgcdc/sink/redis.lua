-- Changes keys, notes and the position in one step, or not at all: see redis.py.
-- KEYS: the record of the position; the notes: the last refused change of each key, with '+' if others were refused before.
-- ARGV: token, position, position afterwards, mode, 'replay' or '', number of notes, key and position of each note in order,
-- then the changes: position, key, the row's previous key (empty: only a deletion), number of columns that were not sent,
-- their names, value.
local token, at, replayed = unpack(redis.call('HMGET', KEYS[1], 'token', 'position', 'replayed'))
if token ~= ARGV[1] or at ~= ARGV[2] then return {'moved', token or '0'} end
local is_sync, is_replay, first_change = ARGV[4] == 'sync', ARGV[5] == 'replay', 7 + 2 * ARGV[6]
local rows, last, left, refused = {}, {}, {'done'}, {'refused'}

-- If an answer was lost, the whole replay is repeated: what the last one changed counts as delivered, not superseded.
local before, done = {}, {}
for position in string.gmatch(replayed or '', '%S+') do before[position] = true end

local notes = {}
for j = 7, first_change - 2, 2 do
  local key, position = ARGV[j], ARGV[j + 1]
  if position > at then  -- otherwise an answer was lost: the server has the note, or something newer replaced it
    notes[key] = notes[key] or {}
    table.insert(notes[key], position)
  end
end

local function note_of(key) return string.match(redis.call('HGET', KEYS[2], key) or '', '^([^+]*)(%+?)$') end

-- Whether the row at this key misses a change before `position`.
local function is_stale(key, position)
  local noted, others = note_of(key)
  if is_replay then return noted ~= position or others ~= '' end
  for _, one in ipairs(notes[key] or {}) do
    if one > (last[key] or '') and one < position then return true end
  end
  return rows[key] == nil and noted ~= '' and noted < position
end

local function merge(value, found, columns)
  local is_read, row = pcall(cjson.decode, type(found) == 'string' and found or '{}')
  local lacks, kept = {}, string.sub(value, 1, -2)
  for _, name in ipairs(columns) do
    local old = is_read and type(row) == 'table' and row[name]
    if not old then lacks[#lacks + 1] = name
    else kept = kept .. ',' .. cjson.encode(name) .. ':' .. cjson.encode(old) end
  end
  if #lacks > 0 then kept = kept .. ',"_unchanged_toast_columns":' .. cjson.encode(lacks) end
  return kept .. '}'
end

local i = first_change
while i <= #ARGV do
  local position, key, source, count = ARGV[i], ARGV[i + 1], ARGV[i + 2], tonumber(ARGV[i + 3])
  local value, kind = ARGV[i + 4 + count], is_sync and rows[key] == nil and redis.call('TYPE', key).ok or 'none'
  local outcome = done
  if is_replay and note_of(key) ~= position then
    outcome = before[position] and done or left
  elseif kind == 'none' or kind == 'string' then
    if count > 0 then
      local found = rows[source]
      if is_stale(source, position) then found = false
      elseif found == nil then found = redis.pcall('GET', source) end
      value = merge(value, found, {unpack(ARGV, i + 4, i + 3 + count)})
    end
    rows[key], last[key] = value ~= '' and value, position
  elseif source ~= '' then refused[#refused + 1] = position .. ' ' .. kind
  else last[key] = position end
  if source ~= '' then table.insert(outcome, position) end
  i = i + 5 + count
end
if #refused > 1 then return refused end

for key, value in pairs(rows) do if not value then redis.call('UNLINK', key) end end  -- first, because it helps a full server
for key, value in pairs(rows) do if value then redis.call('SET', key, value) end end
for key, position in pairs(redis.call('EXISTS', KEYS[2]) == 1 and last or {}) do
  if note_of(key) <= position then redis.call('HDEL', KEYS[2], key) end
end
for key, positions in pairs(notes) do
  for _, position in ipairs(positions) do
    local noted = note_of(key)
    if position > (last[key] or '') and position > noted then
      redis.call('HSET', KEYS[2], key, position .. (noted ~= '' and '+' or ''))
    end
  end
end
redis.call('HSET', KEYS[1], 'position', ARGV[3])
if is_replay then redis.call('HSET', KEYS[1], 'replayed', table.concat(done, ' ')) end
return left
