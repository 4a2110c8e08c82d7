"""The changes of a Redis store, as Lua scripts: the server runs each as a whole, with no other command in between.

A stream is a hash with the fields ``owner`` (missing: released), ``generation``, ``expires`` (missing: deleted), and
those of its states, such as ``current:clock`` and ``previous:clock``.

All scripts may run twice with the same effect as once: a client sends a script again if the connection breaks before
the answer. A server without memory refuses a script at its first write, if that one needs memory; it does not stop a
script that has begun to write. So scripts that store something set a field first, and change nothing when memory is
short. Those that release or delete set none: they work then, too.
"""

from tribe.serve.store.records import Record

FIELDS = Record._fields  # of a state

_COMMON = """
local function time(given)
  if given ~= '' then return tonumber(given) end
  local now = redis.call('TIME')
  return now[1] + now[2] / 1000000
end

local function is_current(key, owner, generation)
  local held = redis.call('HMGET', key, 'owner', 'generation')
  return held[1] == owner and held[2] == generation
end

local function fenced(key)
  local held = redis.call('HMGET', key, 'owner', 'generation')
  return {'fenced', held[1], held[2]}
end

local function chunks(key, place, blobs)
  local found = redis.call('HMGET', key, place .. ':blob', place .. ':chunks')
  local keys = {}
  for i = 1, tonumber(found[2] or '0') do keys[i] = blobs .. found[1] .. ':' .. i end
  return keys
end

local function remove(keys)
  for _, key in ipairs(keys) do redis.call('UNLINK', key) end
end
"""

CLAIM = (  # KEYS: the stream, all streams. ARGV: name, owner, lease, now
    _COMMON
    + """
local now = time(ARGV[4])
local held = redis.call('HMGET', KEYS[1], 'owner', 'generation', 'expires')
local generation = tonumber(held[2] or '0')
if not (held[1] and now < tonumber(held[3])) then
  generation = generation + 1
elseif held[1] ~= ARGV[2] then
  return false
end
local expires = string.format('%.6f', now + tonumber(ARGV[3]))
generation = string.format('%.0f', generation)
redis.call('HSET', KEYS[1], 'owner', ARGV[2], 'generation', generation, 'expires', expires)
redis.call('ZADD', KEYS[2], 0, ARGV[1])
return {generation, expires}
"""
)

RENEW = (  # KEYS: streams. ARGV: lease, now, and for each stream its owner and generation
    _COMMON
    + """
local expires = string.format('%.6f', time(ARGV[2]) + tonumber(ARGV[1]))
local held = {}
for i, key in ipairs(KEYS) do
  if is_current(key, ARGV[2 * i + 1], ARGV[2 * i + 2]) then
    redis.call('HSET', key, 'expires', expires)
    held[#held + 1] = i
  end
end
return {expires, held}
"""
)

RELEASE = (  # KEYS: the stream. ARGV: owner, generation
    _COMMON
    + """
if is_current(KEYS[1], ARGV[1], ARGV[2]) then
  redis.call('HDEL', KEYS[1], 'owner')
end
"""
)

COMMIT = (  # KEYS: stream, chunks of the blob. ARGV: owner, generation, clock, blob, now, prefix of blobs, fields
    _COMMON
    + """
if redis.call('HGET', KEYS[1], 'current:blob') == ARGV[4] then return {'written'} end
if not is_current(KEYS[1], ARGV[1], ARGV[2]) then return fenced(KEYS[1]) end
local before = redis.call('HMGET', KEYS[1], 'current:generation', 'current:clock')
if before[1] == ARGV[2] and tonumber(ARGV[3]) < tonumber(before[2]) then return {'clock', before[2]} end
for i = 2, #KEYS do
  if redis.call('EXISTS', KEYS[i]) == 0 then return {'gone'} end
end
local old_chunks = chunks(KEYS[1], 'previous', ARGV[6])
for i = 7, #ARGV, 2 do
  local old = redis.call('HGET', KEYS[1], 'current:' .. ARGV[i])
  if old then redis.call('HSET', KEYS[1], 'previous:' .. ARGV[i], old) end
  redis.call('HSET', KEYS[1], 'current:' .. ARGV[i], ARGV[i + 1])
end
redis.call('HSET', KEYS[1], 'current:written', string.format('%.6f', time(ARGV[5])))
for i = 2, #KEYS do redis.call('PERSIST', KEYS[i]) end
remove(old_chunks)
return {'written'}
"""
)

DELETE = (  # KEYS: the stream, all streams. ARGV: owner, generation, name, prefix of blobs
    _COMMON
    + """
if not is_current(KEYS[1], ARGV[1], ARGV[2]) then
  local left = redis.call('HMGET', KEYS[1], 'expires', 'generation')
  if not left[1] and left[2] == ARGV[2] then return {'deleted'} end
  return fenced(KEYS[1])
end
remove(chunks(KEYS[1], 'current', ARGV[4]))
remove(chunks(KEYS[1], 'previous', ARGV[4]))
for _, field in ipairs(redis.call('HKEYS', KEYS[1])) do
  if field ~= 'generation' then redis.call('HDEL', KEYS[1], field) end
end
redis.call('ZREM', KEYS[2], ARGV[3])
return {'deleted'}
"""
)
