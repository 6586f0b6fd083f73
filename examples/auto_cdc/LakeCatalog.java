import java.util.ArrayList;
import java.util.HashMap;
import java.util.List;
import java.util.Map;
import org.apache.hadoop.conf.Configuration;
import org.apache.iceberg.PartitionSpec;
import org.apache.iceberg.UpdateProperties;
import org.apache.iceberg.UpdateSchema;
import org.apache.iceberg.catalog.TableIdentifier;
import org.apache.iceberg.hadoop.HadoopCatalog;
import org.apache.iceberg.spark.Spark3Util;
import org.apache.iceberg.spark.SparkSchemaUtil;
import org.apache.iceberg.spark.source.SparkTable;
import org.apache.spark.sql.catalyst.analysis.NoSuchNamespaceException;
import org.apache.spark.sql.catalyst.analysis.NoSuchTableException;
import org.apache.spark.sql.connector.catalog.CatalogV2Util;
import org.apache.spark.sql.connector.catalog.Column;
import org.apache.spark.sql.connector.catalog.Identifier;
import org.apache.spark.sql.connector.catalog.NamespaceChange;
import org.apache.spark.sql.connector.catalog.SupportsNamespaces;
import org.apache.spark.sql.connector.catalog.Table;
import org.apache.spark.sql.connector.catalog.TableCatalog;
import org.apache.spark.sql.connector.catalog.TableChange;
import org.apache.spark.sql.connector.expressions.Transform;
import org.apache.spark.sql.types.StructType;
import org.apache.spark.sql.util.CaseInsensitiveStringMap;

/**
 * Iceberg tables in a folder, for Spark 4.3: Iceberg's own catalog (1.12.0) is for Spark 4.1, and 4.3 refuses it because
 * of its views. Without views the tables work. Not needed any more once there is an Iceberg release for Spark 4.3.
 */
public class LakeCatalog implements TableCatalog, SupportsNamespaces {
  /** A method that Iceberg calls for the columns of a table has one more argument in Spark 4.3. */
  private static class LakeTable extends SparkTable {
    LakeTable(org.apache.iceberg.Table table) {
      super(table);
    }

    @Override
    public Column[] columns() {
      return CatalogV2Util.structTypeToV2Columns(schema(), CatalogV2Util.structTypeToV2Columns$default$2());
    }
  }

  private String name;
  private HadoopCatalog catalog;

  public void initialize(String name, CaseInsensitiveStringMap options) {
    this.name = name;
    this.catalog = new HadoopCatalog(new Configuration(), options.get("warehouse"));
  }

  public String name() {
    return name;
  }

  private static org.apache.iceberg.catalog.Namespace of(String[] namespace) {
    return org.apache.iceberg.catalog.Namespace.of(namespace);
  }

  private static TableIdentifier of(Identifier table) {
    return TableIdentifier.of(of(table.namespace()), table.name());
  }

  public Identifier[] listTables(String[] namespace) {
    return catalog.listTables(of(namespace)).stream()
        .map(table -> Identifier.of(namespace, table.name()))
        .toArray(Identifier[]::new);
  }

  public Table loadTable(Identifier table) throws NoSuchTableException {
    try {
      return new LakeTable(catalog.loadTable(of(table)));
    } catch (org.apache.iceberg.exceptions.NoSuchTableException e) {
      throw new NoSuchTableException(table);
    }
  }

  public Table createTable(Identifier table, StructType schema, Transform[] partitions, Map<String, String> properties) {
    if (partitions.length > 0) throw new UnsupportedOperationException("partitions");
    Map<String, String> kept = new HashMap<>(properties);
    kept.remove("owner");
    kept.remove("provider");
    return new LakeTable(
        catalog.createTable(of(table), SparkSchemaUtil.convert(schema), PartitionSpec.unpartitioned(), kept));
  }

  public Table alterTable(Identifier table, TableChange... changes) throws NoSuchTableException {
    org.apache.iceberg.Table found = catalog.loadTable(of(table));
    UpdateProperties properties = found.updateProperties();
    List<TableChange> columns = new ArrayList<>();
    for (TableChange change : changes) {
      if (change instanceof TableChange.SetProperty set) properties.set(set.property(), set.value());
      else if (change instanceof TableChange.RemoveProperty removed) properties.remove(removed.property());
      else columns.add(change);
    }
    properties.commit();
    if (!columns.isEmpty()) {
      UpdateSchema schema = found.updateSchema();
      Spark3Util.applySchemaChanges(schema, columns).commit();
    }
    return loadTable(table);
  }

  public boolean dropTable(Identifier table) {
    return catalog.dropTable(of(table));
  }

  public void renameTable(Identifier from, Identifier to) {
    throw new UnsupportedOperationException("rename");
  }

  public String[][] listNamespaces() {
    return catalog.listNamespaces().stream().map(one -> one.levels()).toArray(String[][]::new);
  }

  public String[][] listNamespaces(String[] namespace) {
    return new String[0][];
  }

  public boolean namespaceExists(String[] namespace) {
    return catalog.namespaceExists(of(namespace));
  }

  public Map<String, String> loadNamespaceMetadata(String[] namespace) throws NoSuchNamespaceException {
    if (!namespaceExists(namespace)) throw new NoSuchNamespaceException(namespace);
    return Map.of();
  }

  public void createNamespace(String[] namespace, Map<String, String> metadata) {
    catalog.createNamespace(of(namespace));
  }

  public void alterNamespace(String[] namespace, NamespaceChange... changes) {
    throw new UnsupportedOperationException("namespace properties");
  }

  public boolean dropNamespace(String[] namespace, boolean cascade) {
    return catalog.dropNamespace(of(namespace));
  }
}
