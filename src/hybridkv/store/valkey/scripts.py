"""Lua scripts that the server runs atomically. Each touches the keys of one shard, and so one slot of a cluster.

The counters of a shard always equal the sum over its index. A server that has reached `maxmemory` refuses scripts whose
first write may enlarge memory: INDEX then changes nothing, and REMOVE begins with deletions.
"""

from __future__ import annotations

INDEX = """
local nbytes = redis.call('STRLEN', KEYS[1])
if nbytes == 0 then return 0 end
local old = redis.call('HGET', KEYS[2], ARGV[1])
redis.call('HSET', KEYS[2], ARGV[1], string.format('%d', nbytes) .. ' ' .. ARGV[2])
redis.call('ZADD', KEYS[3], ARGV[3], ARGV[1])
if old then
  redis.call('HINCRBY', KEYS[4], 'nbytes', nbytes - (string.match(old, '^%d+') or 0))
else
  redis.call('HINCRBY', KEYS[4], 'objects', 1)
  redis.call('HINCRBY', KEYS[4], 'nbytes', nbytes)
end
return 1
"""
"""Keys: object, meta, used, usage. Arguments: field, worth, time of use. Enters an object that exists."""

_FORGET = """
local objects, nbytes = 0, 0
local function forget(field)
  local entry = redis.call('HGET', KEYS[1], field)
  redis.call('ZREM', KEYS[2], field)
  if entry then
    redis.call('HDEL', KEYS[1], field)
    objects, nbytes = objects + 1, nbytes + (string.match(entry, '^%d+') or 0)
  end
end
local function count()
  if objects > 0 then
    redis.call('HINCRBY', KEYS[3], 'objects', -objects)
    redis.call('HINCRBY', KEYS[3], 'nbytes', string.format('%d', -nbytes))
  end
end
"""

REMOVE = f"""{_FORGET}
local gone, half = 0, #ARGV / 2
for i = 1, half do
  local field, latest = ARGV[i], ARGV[half + i]
  local used = latest ~= '' and redis.call('ZSCORE', KEYS[2], field)
  if not used or tonumber(used) <= tonumber(latest) then
    gone = gone + redis.call('UNLINK', KEYS[3 + i])
    forget(field)
  end
end
count()
return gone
"""
"""Keys: meta, used, usage, objects. Arguments: fields, then for each a time or ''. Objects used later are kept."""

PRUNE = f"""{_FORGET}
local stale = 0
for i = 1, #ARGV do
  if redis.call('EXISTS', KEYS[3 + i]) == 0 then
    stale = stale + 1
    forget(ARGV[i])
  end
end
count()
return stale
"""
"""Keys: meta, used, usage, objects. Arguments: fields. Removes entries of objects that do not exist."""

RECOUNT = """
local objects, nbytes = 0, 0
for _, entry in ipairs(redis.call('HVALS', KEYS[1])) do
  objects, nbytes = objects + 1, nbytes + (string.match(entry, '^%d+') or 0)
end
redis.call('DEL', KEYS[2])
if objects > 0 then
  redis.call('HSET', KEYS[2], 'objects', objects, 'nbytes', string.format('%d', nbytes))
end
return objects
"""
"""Keys: meta, usage. Counts a shard's index again."""

OLDEST = """
local found, entries = redis.call('ZRANGE', KEYS[2], 0, ARGV[1] - 1, 'WITHSCORES'), {}
for i = 1, #found, 2 do
  entries[#entries + 1] = found[i]
  entries[#entries + 1] = found[i + 1]
  entries[#entries + 1] = redis.call('HGET', KEYS[1], found[i]) or ''
end
return entries
"""
"""Keys: meta, used. Argument: how many. Returns field, time and entry of each, the least recently used first."""

IS_EMPTY = "return redis.call('EXISTS', KEYS[1]) == 1 and redis.call('STRLEN', KEYS[1]) == 0 and 1 or 0"
"""Key: an object. Two commands would take an object that is written between them for an empty one."""

LOCK = """
if redis.call('EXISTS', KEYS[1]) == 1 then return 0 end
redis.call('DEL', KEYS[1])
redis.call('SET', KEYS[1], ARGV[1], 'PX', ARGV[2])
return 1
"""
"""Key: the lock. Arguments: token, milliseconds. A plain SET would be refused while memory is full.

DEL deletes nothing, and is the first write.
"""

USAGE = """
local objects, nbytes = 0, 0
for _, key in ipairs(KEYS) do
  local one = redis.call('HMGET', key, 'objects', 'nbytes')
  objects, nbytes = objects + (one[1] or 0), nbytes + (one[2] or 0)
end
return {string.format('%d', objects), string.format('%d', nbytes)}
"""
"""Keys: usage of all shards, which only a single server has in one place. Returns their sum."""

UNLOCK = "if redis.call('GET', KEYS[1]) == ARGV[1] then return redis.call('DEL', KEYS[1]) end return 0"
