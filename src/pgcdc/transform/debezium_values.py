"""Values as Debezium's PostgreSQL connector writes them with its default settings: SQL text of Spark expressions.

A value is PostgreSQL's text, its type is what the column `shape` of the event says (`stream.shape`). Everything here runs in
the JVM. Spark interprets the body of a lambda node by node, so that the order of the cases is what makes it cheap.
"""

from __future__ import annotations

from pgcdc.event.shape import ARRAY, NO_MODIFIER, REQUIRED, ZERO, Family

__all__ = ["absent", "placeholder", "quote", "value"]

UNAVAILABLE = "__debezium_unavailable_value"
_UNAVAILABLE_BASE64 = "X19kZWJleml1bV91bmF2YWlsYWJsZV92YWx1ZQ=="
_UNAVAILABLE_BYTES = ",".join(str(byte) for byte in UNAVAILABLE.encode())
_MAX, _MIN = 2**63 - 1, -(2**63)


def quote(text: str) -> str:
    """A JSON string. Few need to be escaped, and those are left to Spark."""
    return f"""if({text} RLIKE r'[\\x00-\\x1f"\\\\]', btrim(to_json(array({text})), '[]'), concat('"', {text}, '"'))"""


def value(text: str, code: str, modifier: str) -> str:
    """The JSON of a value; NULL if Debezium leaves columns of its type out."""
    scalar = _scalar("x", f"({code} & {ARRAY - 1})", f"({modifier} & {NO_MODIFIER})")
    elements = f"transform(if({code} < {ARRAY}, array({text}), {_elements(text)}), x -> {scalar})"
    rendered = f"transform(array({elements}), r -> if({code} < {ARRAY}, r[0], concat('[', array_join(r, ','), ']')))[0]"
    # Of an array with more dimensions than one, or what is none any more: its text.
    is_odd = f"({code} >= {ARRAY} AND {text} NOT RLIKE r'^(\\[[^=]*=)?\\{{[^{{]')"
    return f"""CASE
        WHEN ({code} & {ARRAY - 1}) = {Family.OTHER} THEN NULL
        WHEN {text} IS NULL THEN 'null'
        WHEN {code} = {Family.TEXT} OR {code} = {Family.UUID} OR {is_odd} THEN {quote(text)}
        WHEN {code} = {Family.INTEGER} THEN coalesce(CAST(try_cast({text} AS BIGINT) AS STRING), {quote(text)})
        ELSE {rendered} END"""


def placeholder(code: str) -> str:
    """What stands for a value that was not sent because it did not change; NULL where Debezium has nothing to say so."""
    string, base64 = f"""'"{UNAVAILABLE}"'""", f"""'"{_UNAVAILABLE_BASE64}"'"""
    return f"""CASE
        WHEN {code} = {Family.TEXT} THEN {string}
        WHEN {code} = {Family.BYTES} THEN {base64}
        WHEN {code} = {Family.TEXT + ARRAY} THEN concat('[', {string}, ']')
        WHEN {code} = {Family.BYTES + ARRAY} THEN concat('[', {base64}, ']')
        WHEN {code} IN ({Family.INTEGER + ARRAY}, {Family.DATE + ARRAY}) THEN '[{_UNAVAILABLE_BYTES}]'
        WHEN {code} = {Family.HSTORE} THEN r'"{{\\"{UNAVAILABLE}\\":\\"{UNAVAILABLE}\\"}}"'
        END"""


def absent(code: str, modifier: str) -> str:
    """What a key-only old row has in its other columns: null, or a zero where the column is NOT NULL. NULL: left out."""
    zeros = {
        0: (Family.INTEGER, Family.DATE, Family.TIME, Family.TIMESTAMP, Family.INTERVAL),
        "0.0": (Family.DOUBLE, Family.FLOAT),
        "false": (Family.BOOLEAN, Family.BIT),
        '"AA=="': (Family.NUMERIC, Family.MONEY),
        '{"scale":0,"value":"AA=="}': (Family.NUMBER,),
        '"1970-01-01T00:00:00Z"': (Family.TIMESTAMPTZ,),
        '"00:00:00Z"': (Family.TIMETZ,),
        '"{}"': (Family.HSTORE,),
        "[]": (Family.VECTOR, Family.HALFVEC),
        '{"x":0.0,"y":0.0,"wkb":"AQEAAAAAAAAAAAAAAAAAAAAAAAAA","srid":null}': (Family.POINT,),
        "null": (Family.SPARSEVEC,),
    }
    cases = " ".join(
        f"WHEN {code} IN ({', '.join(str(int(one)) for one in families)}) THEN '{text}'"
        for text, families in zeros.items()
    )
    return f"""CASE
        WHEN ({code} & {ARRAY - 1}) = {Family.OTHER} THEN NULL
        WHEN {modifier} < {REQUIRED} THEN 'null'
        WHEN {code} >= {ARRAY} THEN '[]'
        {cases} ELSE '""' END"""


# --- one value


def _scalar(x: str, family: str, modifier: str) -> str:
    """The JSON of a single value: as its family is written, or as text if it cannot be read as one of it."""
    cases = {
        Family.TEXT: quote(x),
        Family.INTEGER: f"CAST(try_cast({x} AS BIGINT) AS STRING)",
        Family.BOOLEAN: f"CASE {x} WHEN 't' THEN 'true' WHEN 'f' THEN 'false' END",
        Family.DOUBLE: _double(x, "DOUBLE"),
        Family.FLOAT: _double(x, "FLOAT"),
        Family.NUMERIC: f"if({_is_special(x)}, 'null', {_base64_number(_unpointed(x))})",
        Family.TIMESTAMPTZ: _timestamptz(x, modifier),
        Family.TIMESTAMP: _timestamp(x, modifier),
        Family.DATE: _date(x),
        Family.TIME: _time(x, modifier),
        Family.UUID: quote(x),
        Family.BYTES: _base64(f"unhex(substring({x}, 3))"),
        Family.NUMBER: _number(x),
        Family.INTERVAL: _interval(x),
        Family.TIMETZ: _timetz(x),
        Family.BIT: f"CASE {x} WHEN '1' THEN 'true' WHEN '0' THEN 'false' WHEN '' THEN 'null' END",
        Family.BITS: _bits(x),
        Family.MONEY: _base64_number(f"concat(if({x} LIKE '(%', '-', ''), regexp_replace({x}, '[^0-9-]', ''))"),
        Family.HSTORE: _hstore(x),
        Family.POINT: _point(x),
        Family.VECTOR: _vector(x, "DOUBLE"),
        Family.HALFVEC: _vector(x, "FLOAT"),
        Family.SPARSEVEC: _sparse(x),
    }
    whens = " ".join(f"WHEN {family} = {int(one)} THEN {text}" for one, text in cases.items())
    return f"CASE WHEN {x} IS NULL THEN 'null' ELSE coalesce(CASE {whens} END, {quote(x)}) END"


def _base64(data: str) -> str:
    """With quotes. Spark breaks lines after 76 characters, as mail does."""
    return f"""concat('"', replace(base64({data}), '\r\n', ''), '"')"""


def _let(name: str, meaning: str, body: str) -> str:
    """`body`, in which `name` stands for `meaning`, which is worked out once."""
    return f"transform(array({meaning}), {name} -> {body})[0]"


def _double(x: str, kind: str) -> str:
    """A number as Java writes it; JSON has no NaN and no infinity."""
    number = f"CAST(try_cast({x} AS {kind}) AS STRING)"
    special = f"""if({x} IN ('NaN', 'Infinity', '-Infinity'), concat('"', {x}, '"'), NULL)"""
    return f"if({x} LIKE '%N%' OR {x} LIKE '%I%' OR {x} LIKE '%n%', {special}, {number})"


# --- numbers of any size


def _base64_number(digits: str) -> str:
    """The bytes of an integer, as few as it needs, highest first, in two's complement: in Base64, with quotes."""
    positive, negative = "regexp_replace(h, '^(00)+(?=[0-7])', '')", "regexp_replace(h, '^(FF)+(?=[89A-F])', '')"
    strip = _let("h", _hex_number("d"), f"if(d LIKE '-%' AND h RLIKE '^[89A-F]', {negative}, {positive})")
    return _let("d", digits, _base64(f"unhex({strip})"))


def _hex_number(d: str) -> str:
    """At least as many bytes as needed."""
    return f"""CASE WHEN length({d}) <= 18 THEN lpad(hex(try_cast({d} AS BIGINT)), 16, '0')
        WHEN length({d}) <= 37 THEN {_hex_16_bytes(f"try_cast({d} AS DECIMAL(38,0))")}
        ELSE {_hex_large(d)} END"""


def _hex_16_bytes(number: str) -> str:
    low = f"pmod(n, {2**64}BD)"
    upper = f"lpad(hex(CAST((n - l) div {2**64}BD AS BIGINT)), 16, '0')"
    lower = f"lpad(hex(CAST(if(l >= {2**63}BD, l - {2**64}BD, l) AS BIGINT)), 16, '0')"
    return _let("n", number, _let("l", low, f"concat({upper}, {lower})"))


def _hex_large(d: str) -> str:
    """Digits in groups of nine become words of 32 bits, lowest first; of a negative number, their complement."""
    digits = f"ltrim('-', {d})"
    groups = """transform(sequence(1, CAST(ceil(length(g) / 9) AS INT)),
        i -> CAST(substring(lpad(g, CAST(ceil(length(g) / 9) AS INT) * 9, '0'), i * 9 - 8, 9) AS BIGINT))"""
    # Carries go up one word at a time: a word stays below 2^33, so that its product fits into 64 bits.
    step = f"""transform(w || array(0L), (y, i) -> (y * 1000000000 & {2**32 - 1})
        + if(i = 0, c, shiftrightunsigned(w[i - 1] * 1000000000, 32)))"""
    carried = _let("g", digits, f"aggregate({groups}, array(0L), (w, c) -> {step})")
    words = f"""aggregate({carried} || array(0L), named_struct('o', CAST(array() AS ARRAY<BIGINT>), 'c', 0L),
        (s, y) -> named_struct('o', s.o || array(y + s.c & {2**32 - 1}), 'c', shiftrightunsigned(y + s.c, 32)), s -> s.o)"""
    complement = f"""aggregate({words}, named_struct('o', CAST(array() AS ARRAY<BIGINT>), 'c', 1L),
        (s, y) -> named_struct('o', s.o || array((~y & {2**32 - 1}) + s.c & {2**32 - 1}),
            'c', if((~y & {2**32 - 1}) + s.c > {2**32 - 1}, 1L, 0L)), s -> s.o)"""
    signed = f"if({d} LIKE '-%', {complement}, {words})"
    return f"array_join(transform(reverse({signed}), y -> lpad(hex(y), 8, '0')), '')"


def _number(x: str) -> str:
    """A numeric without a declared scale has the scale that it needs."""
    plain = f"if({x} LIKE '%.%', rtrim('.', rtrim('0', {x})), {x})"
    scale = "if(p LIKE '%.%', length(substring_index(p, '.', -1)), 0)"
    written = f"""concat('{{"scale":', {scale}, ',"value":', {_base64_number(_unpointed("p"))}, '}}')"""
    return f"if({_is_special(x)}, 'null', {_let('p', plain, written)})"


def _is_special(x: str) -> str:
    return f"{x} IN ('NaN', 'Infinity', '-Infinity')"


def _unpointed(x: str) -> str:
    return f"replace({x}, '.', '')"


# --- times


def _digits(modifier: str) -> str:
    """Of the seconds."""
    return f"if({modifier} = {NO_MODIFIER}, 6, {modifier} - {ZERO})"


def _astronomical(x: str) -> str:
    """Years as Java counts them: 1 BC is 0, 44 BC is -43, and more than four digits have a sign."""
    year = f"substring_index({x}, '-', 1)"
    before = f"""concat('-', lpad(CAST(try_cast({year} AS INT) - 1 AS STRING), 4, '0'),
        replace(substring({x}, length({year}) + 1), ' BC', ''))"""
    return f"CASE WHEN {x} LIKE '% BC' THEN {before} WHEN {x} LIKE '_____%-%-%' THEN concat('+', {x}) ELSE {x} END"


def _year(x: str) -> str:
    return f"if({x} LIKE '____-%' AND {x} NOT LIKE '%C', {x}, {_astronomical(x)})"


def _date(x: str) -> str:
    return f"""CASE {x} WHEN 'infinity' THEN '-2147472692' WHEN '-infinity' THEN '-2147472691'
        ELSE CAST(unix_date(try_cast({_year(x)} AS DATE)) AS STRING) END"""


def _timestamp(x: str, modifier: str) -> str:
    """Since 1970, in milliseconds if the column has no finer ones. The last years there are do not fit into 64 bits."""
    micros = f"""CASE {x} WHEN 'infinity' THEN 9223372036825200000 WHEN '-infinity' THEN -9223372036832400000
        ELSE coalesce(unix_micros(try_cast(concat({_year(x)}, 'Z') AS TIMESTAMP)),
            if({x} LIKE '29____-%', {_MAX}, NULL)) END"""
    return f"CAST({micros} div if({_digits(modifier)} <= 3, 1000, 1) AS STRING)"


def _timestamptz(x: str, modifier: str) -> str:
    """ISO 8601 in UTC, in which the session has it."""
    whole = "substring_index(m, '.', 1)"
    padded = f"rpad(if(m LIKE '%.%', m, concat(m, '.')), length({whole}) + 1 + {_digits(modifier)}, '0')"
    moment = _year(f"replace({x}, '+00', '')")
    shown = f"if({_digits(modifier)} = 0, {whole}, {padded})"
    return f"""if({x} LIKE '%infinity', concat('"', {x}, '"'), if({x} NOT LIKE '%+00%', NULL,
        {_let("m", moment, f'''concat('"', replace({shown}, ' ', 'T'), 'Z"')''')}))"""


def _seconds(x: str) -> str:
    parts = [f"try_cast(substring({x}, {begin}, 2) AS BIGINT)" for begin in (1, 4, 7)]
    return f"({parts[0]} * 3600 + {parts[1]} * 60 + {parts[2]})"


def _time(x: str, modifier: str) -> str:
    micros = f"({_seconds(x)} * 1000000 + try_cast(rpad(substring({x}, 10), 6, '0') AS BIGINT))"
    return f"CAST({micros} div if({_digits(modifier)} <= 3, 1000, 1) AS STRING)"


def _timetz(x: str) -> str:
    """Moved to UTC."""
    shift = f"regexp_extract({x}, '[+-].*$', 0)"
    padded = "rpad(substring(z, 2), 8, ':00')"
    offset = f"{_seconds(padded)} * if(z LIKE '-%', -1, 1)"
    seconds = _let("z", shift, f"pmod({_seconds(x)} - {offset}, 86400)")
    parts = [f"lpad(CAST({part} AS STRING), 2, '0')" for part in ("t div 3600", "t div 60 % 60", "t % 60")]
    fraction = f"regexp_extract({x}, '[.][0-9]+', 0)"
    return _let("t", seconds, f"""concat('"', {", ':', ".join(parts)}, {fraction}, 'Z"')""")


_INTERVAL = "^P(?:(-?[0-9]+)Y)?(?:(-?[0-9]+)M)?(?:(-?[0-9]+)D)?(?:T(?:(-?[0-9]+)H)?(?:(-?[0-9]+)M)?(?:(-?[0-9.]+)S)?)?$"
_PARTS = {1: "31557600", 2: "2629800", 3: "86400", 4: "3600", 5: "60", 6: "1"}
"""How many seconds each of them has: a month is a twelfth of 365.25 days."""


def _interval(x: str) -> str:
    """Microseconds, as far as 64 bits go."""
    parts = " + ".join(
        f"coalesce(try_cast(regexp_extract({x}, '{_INTERVAL}', {group}) AS DECIMAL(20,6)), 0BD) * {seconds}BD"
        for group, seconds in _PARTS.items()
    )
    micros = f"CAST(({parts}) * 1000000BD AS DECIMAL(38,0))"
    within = f"CAST(greatest(least({micros}, {_MAX}BD), {_MIN}BD) AS STRING)"
    return f"CASE WHEN {x} LIKE 'P%' THEN {within} WHEN {x} LIKE '%infinity' THEN '0' END"


# --- the rest


_EMPTY = '""'


def _bits(x: str) -> str:
    """Bytes, lowest first, without zeros at the end."""
    padded = "lpad(b, CAST(ceil(length(b) / 8) AS INT) * 8, '0')"
    each = f"transform(reverse(regexp_extract_all({padded}, '.{{8}}', 0)), y -> lpad(conv(y, 2, 16), 2, '0'))"
    written = _base64(f"unhex(array_join({each}, ''))")
    return f"""if({x} RLIKE '[^01]', NULL, {_let("b", f"ltrim('0', {x})", f"if(b = '', '{_EMPTY}', {written})")})"""


_STRING = r'"[^"\\]*+(?:\\.[^"\\]*+)*+"'


def _unescape(text: str) -> str:
    """What stands between quotes of an array or hstore."""
    return rf"regexp_replace(substring({text}, 2, length({text}) - 2), r'(?s)\\(.)', '$1')"


def _hstore(x: str) -> str:
    """A JSON object, as a string."""
    pairs = f"regexp_extract_all({x}, r'(?s){_STRING}=>(?:{_STRING}|NULL)', 0)"
    key = f"regexp_extract(p, r'(?s)^{_STRING}', 0)"
    inner = (
        f"""if(p LIKE '%NULL', 'null', {_let("q", f"substring(p, length({key}) + 3)", quote(f"{_unescape('q')}"))})"""
    )
    pair = _let("k", key, f"concat({quote(_unescape('k'))}, ':', {inner})")
    written = _let("o", f"concat('{{', array_join(transform({pairs}, p -> {pair}), ','), '}}')", quote("o"))
    return f"""if({x} = '' OR {x} LIKE '"%', {written}, NULL)"""


def _point(x: str) -> str:
    """With the same as WKB: its byte order, that it is a point, and two doubles."""
    doubles = ", ".join(_hex_double(one) for one in ("c[0]", "c[1]"))
    written = f"""concat('{{"x":', {_double("c[0]", "DOUBLE")}, ',"y":', {_double("c[1]", "DOUBLE")},
        ',"wkb":"', base64(unhex(concat('0101000000', {doubles}))), '","srid":null}}')"""
    valid = "try_cast(c[0] AS DOUBLE) IS NOT NULL AND try_cast(c[1] AS DOUBLE) IS NOT NULL"
    return _let("c", f"split(btrim({x}, '()'), ',')", f"if(size(c) = 2 AND {valid}, {written}, NULL)")


def _hex_double(text: str) -> str:
    """The eight bytes of a double, lowest first. Spark has no function for its bits, so they are worked out."""
    exponent = "CAST(floor(log2(v)) AS INT)"  # may be one off, close to a power of two
    exact = (
        f"{exponent} + CASE WHEN v < pow(2D, {exponent}) THEN -1 WHEN v / 2 >= pow(2D, {exponent}) THEN 1 ELSE 0 END"
    )
    normal = _let("p", exact, f"(p + 1023L) * {2**52} + CAST((v / pow(2D, p) - 1) * {2**52} AS BIGINT)")
    bits = f"""CASE WHEN v = 0 THEN 0L WHEN isnan(v) THEN {0x7FF8 << 48}L
        WHEN v > 1.7976931348623157E308D THEN {0x7FF0 << 48}L
        WHEN v < 2.2250738585072014E-308D THEN CAST(v * pow(2D, 537) * pow(2D, 537) AS BIGINT) ELSE {normal} END"""
    signed = f"({_let('v', f'abs(CAST({text} AS DOUBLE))', bits)}) + if({text} LIKE '-%', {_MIN + 1}L - 1L, 0L)"
    turned = ", ".join(f"substring(h, {place}, 2)" for place in range(15, 0, -2))
    return _let("h", f"lpad(hex({signed}), 16, '0')", f"concat({turned})")


def _vector(x: str, kind: str) -> str:
    numbers = f"transform(split(btrim({x}, '[]'), ','), y -> CAST(try_cast(y AS {kind}) AS STRING))"
    return f"if({x} LIKE '[%]', concat('[', array_join({numbers}, ','), ']'), NULL)"


def _sparse(x: str) -> str:
    pair = "concat('[', split_part(y, ':', 1), ',', CAST(try_cast(split_part(y, ':', 2) AS DOUBLE) AS STRING), ']')"
    pairs = f"transform(split(btrim(split_part({x}, '/', 1), '{{}}'), ','), y -> {pair})"
    written = f"""concat('{{"dimensions":', split_part({x}, '/', 2), ',"vector":[', array_join({pairs}, ','), ']}}')"""
    entry = "[0-9]+:[-+.0-9eE]+"
    return f"if({x} RLIKE r'^[{{]({entry}(,{entry})*)?[}}]/[0-9]+$', {written}, NULL)"


# --- arrays


def _elements(text: str) -> str:
    """Of an array of one dimension, as text; NULL for NULL."""
    body = f"if({text} LIKE '[%', substring({text}, instr({text}, '=') + 1), {text})"
    plain = "split(substring(a, 2, length(a) - 2), ',')"
    quoted = f"regexp_extract_all(a, r'(?s){_STRING}|[^,{{}}]+', 0)"
    each = f"""CASE WHEN e = 'NULL' THEN NULL WHEN e LIKE '"%' THEN {_unescape("e")} ELSE e END"""
    parts = f"""if(a LIKE '%"%', {quoted}, {plain})"""
    found = f"if(a = '{{}}', CAST(array() AS ARRAY<STRING>), transform({parts}, e -> {each}))"
    return _let("a", body, found)
